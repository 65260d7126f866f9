"""A conversion, from a source to a complete folder.

plan -> measure -> write, shard by shard, each compared with the source when it is complete ->
logits -> report -> publish. Every step continues from what an interrupted run has left.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConversionError, InvalidRequestError, UnsupportedModelError
from ..memory import human_bytes
from ..models.config import normalise
from ..models.jsonfields import read_json
from ..text import Tokenizer
from . import budget
from .arrange import ArrangedSource, OutputTensor, arrange
from .calibration.allocation import choose_formats, least_bytes
from .calibration.feedback import FeedbackPass, Feedbacks
from .calibration.logits import LogitsOf, compare_logits, limit_for, top1_for
from .calibration.measure import CalibrationPass, Measurements, load_measurements, save_measurements
from .calibration.texts import Texts, make_texts
from .files import partial_path, write_file
from .journal import Journal
from .learn import LearnedLayer, LearningPass, put_into_file, summary
from .plan import ConversionPlan, PlannedTensor, dumped, make_plan
from .read import MLXFormat, Source
from .recipes import ConversionOptions, identity
from .report import ConversionReport, make_report, write_card
from .sidefiles import config_json, has_tokenizer, index_json, write_json, write_side_files
from .sizes import SizePoint, predicted_sizes, size_of
from .split_experts import check_splits, split_experts
from .verify import Progress
from .workplace import Workplace, check_target, disk_failures, working
from .write import (
    TensorWriter,
    WriteProgress,
    checked_entries,
    little_cached,
    write_shard,
    written_entries,
)

NO_TOKENIZER = (
    "There is no tokenizer: add the model's tokenizer.json, or convert with --tokenizer FOLDER."
)
FEW_TOKENS_SEEN = (
    "{count} matrices of experts saw too few tokens of the calibration text for error feedback "
    "and were rounded to the nearest: a longer --calibration text would help them."
)
AHEAD = (
    "{count} tensors ({first} …) predict tokens further ahead: they are kept for speculation; "
    "a forward pass leaves them out."
)
OpenModel = Callable[[Path], AbstractContextManager[LogitsOf]]


@dataclass(slots=True)
class Conversion:
    """One source on its way to one folder."""

    source: Source
    out: Path
    options: ConversionOptions
    open_model: OpenModel | None = None  # None: logits are not checked
    progress: Progress = lambda *_: None
    look_again: Callable[[], str] | None = None  # the source's fingerprint as it is now
    arranged: ArrangedSource = field(init=False)
    _learned: list[LearnedLayer] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for a target that no formats meet, or experts that are not."""
        self.arranged = arrange(self.source)
        plan = self.plan()
        if self.options.split_experts:
            check_splits(plan)
        limit = self.options.limit_bytes(plan.num_weights)
        if limit is None:
            return
        least = self.least_bytes()
        if least > limit:
            raise InvalidRequestError(
                f"The target is {human_bytes(limit)}; the smallest formats make "
                f"{human_bytes(least)}, {least * 8 / plan.num_weights:.2f} bits per weight.",
                param="target",
            )

    def least_bytes(self) -> int:
        """Bytes of the smallest output that a target can ask for."""
        return least_bytes(self.arranged, self.options.recipe, self.plan())

    def plan(self, formats: dict[str, MLXFormat | None] | None = None) -> ConversionPlan:
        """The plan as far as it is known: a target's formats follow from measuring."""
        options = self.options
        return make_plan(
            self.arranged,
            options.recipe,
            chosen=formats,
            shard_bytes=options.shard_bytes,
            by_layer=options.feeds_back,
        )

    def run(self, *, resume: bool = False, restart: bool = False) -> ConversionReport:
        """Convert.

        Raises:
            ConversionError: the target, the disk or what is written is not as it should be.
            CheckpointError: the source is broken.
        """
        place = Workplace(self.out)
        self._check_room(place)
        self.check_tokenizer()
        with (
            working(place, resume=resume, restart=restart),
            little_cached(),
            disk_failures(place),
        ):
            return self._run(place)

    def disk_bytes(self) -> int:
        """Estimated bytes on the disk, during the conversion and after it."""
        return budget.disk_bytes(
            self.arranged,
            self.plan(),
            self.options,
            comparing=self._comparing,
            local=self._is_local,
        )

    def peak_bytes(self) -> int:
        """Estimated bytes of memory at most."""
        return budget.peak_bytes(
            self.arranged, self.plan(), self.options, comparing=self._comparing
        )

    @property
    def _is_local(self) -> bool:
        return Path(self.source.label).exists()

    @property
    def _comparing(self) -> bool:
        config = self.arranged.config
        return self.open_model is not None and not (config.headless or config.bidirectional)

    def _check_room(self, place: Workplace) -> None:
        """Raise if the target cannot be met, or the disk or the memory is too small."""
        label = Path(self.source.label) if self._is_local else None
        files = [path for path in place.root.rglob("*") if path.is_file()]
        there = sum(path.stat().st_blocks * 512 for path in files)
        check_target(place, label, max(0, self.disk_bytes() - there))
        limit, needed = self.options.max_memory, self.peak_bytes()
        if limit is not None and needed > limit:
            raise InvalidRequestError(
                f"max_memory is {limit / 1e6:,.0f} MB, but about {needed / 1e6:,.0f} MB are "
                "needed. Measuring holds one layer, comparing logits the output: without both "
                "(--calibration none --check tensors) it may be enough.",
                param="max_memory",
            )

    @property
    def _needs_texts(self) -> bool:
        return self.options.calibration is not None or self._comparing

    def check_tokenizer(self) -> None:
        """Raise if texts are needed and there is no tokenizer."""
        if self._needs_texts and not has_tokenizer(self.source.side_files()):
            raise ConversionError(
                f"{self.source.label} has no tokenizer, which calibration and comparing logits "
                "need. Name a folder that has the model's tokenizer.json with --tokenizer FOLDER, "
                "or do without both: --calibration none --check tensors."
            )

    def _run(self, place: Workplace) -> ConversionReport:
        journal = Journal(place.journal)
        journal.begin(
            {
                "source": self.source.fingerprint,
                **identity(self.options, comparing=self._comparing),
                "rounding": self._rounding(),
            }
        )
        write_side_files(place.model, self.source)
        unloadable = self._check_side_files(place)
        texts, found = self._measure(place)
        plan = self.plan(self._formats(found))
        check_same_plan(place, plan)
        write_json(
            place.model / "config.json", config_json(self.source, self.arranged.config, plan)
        )
        write_json(place.model / "model.safetensors.index.json", index_json(plan))
        self._write(place, plan, journal, found, texts)
        tensors = [entry for name, _ in plan.shards() for entry in journal.shards[name]]
        report = make_report(self.source, plan, tensors, compared=self.options.check_tensors)
        report.loads = unloadable is None
        report.notes += self._notes(plan, journal, unloadable)
        if self.open_model is not None and texts is not None:
            report = replace(report, logits=self._compare(place, plan, texts))
        if self.options.split_experts:
            split_experts(place.model, plan)
        write_json(place.model / "report.json", report.as_dict())
        sizes = self._sizes(found, plan)
        write_card(place.model, report, self.source, sizes, draw=self.options.figures)
        if self.look_again is not None and self.look_again() != self.source.fingerprint:
            raise ConversionError("The source changed while it was converted; use --restart.")
        place.publish()
        return report

    def _notes(self, plan: ConversionPlan, journal: Journal, unloadable: str | None) -> list[str]:
        """What the caller should know of the output."""
        notes = []
        if not has_tokenizer(self.source.side_files()):
            notes.append(NO_TOKENIZER)
        if unloadable is not None:
            notes.append(unloadable)
        if ahead := [tensor.output.name for tensor in plan.tensors if tensor.output.ahead]:
            notes.append(AHEAD.format(count=len(ahead), first=min(ahead)))
        if self._learned:
            notes.append(summary(self._learned))
        if few := sum(entry.get("nearest", 0) for entry in journal.tensors.values()):
            notes.append(FEW_TOKENS_SEEN.format(count=few))
        if anew := plan.quantised_anew:
            formats = ", ".join(dict.fromkeys(tensor.output.stored for tensor in anew))
            notes.append(
                f"{len(anew)} of {len(plan.tensors)} tensors were quantised already ({formats}) "
                "and now are anew: from weights that never were, the result would be better."
            )
        return notes

    def _sizes(self, found: Measurements, plan: ConversionPlan) -> list[SizePoint]:
        """Of other ways to convert, and of this one last; []: nothing was measured."""
        if not found.units:
            return []
        own = size_of("this one", plan, found)
        recipe = self.options.recipe
        return [point for _, point in predicted_sizes(self.arranged, recipe, found)] + [own]

    def _check_side_files(self, place: Workplace) -> str | None:
        """Load config and tokenizer as loading the output will, before hours of work.

        Returns:
            Why the tokenizer cannot be loaded here, where it is not broken.

        Raises:
            CheckpointError: the tokenizer or generation_config.json is broken.
        """
        normalise(self.source.config, _generation_config(place.model))
        if not has_tokenizer(self.source.side_files()):
            return None
        try:
            Tokenizer.from_folder(place.model)
        except UnsupportedModelError as error:
            return str(error)
        return None

    def _measure(self, place: Workplace) -> tuple[Texts | None, Measurements]:
        """The pass over the model, unless nothing needs it or an earlier run has done it."""
        options = self.options
        if not self._needs_texts:
            return None, Measurements()
        texts = self.texts(place.model)
        if place.measured.exists():
            return texts, load_measurements(place.measured, self.arranged)
        references = place.references if self._comparing else ()
        found = self.calibrate(texts, probing=options.targeted, references=references)
        if options.calibration is None:
            found.importance = {}
        save_measurements(place.measured, found)
        return texts, found

    def calibrate(self, texts: Texts, *, probing: bool, references: Sequence[Path]) -> Measurements:
        """The calibration pass over the model.

        Args:
            texts: for calibration and, with `references`, for comparing.
            probing: measure the cost of each unit.
            references: files for the logits of short and of long contexts; (): none are compared.
        """
        state = CalibrationPass(
            self.arranged,
            texts,
            self.options.recipe,
            probing=probing,
            comparing=bool(references),
        )
        try:
            state.run(lambda done, count: self.progress("measure", done, count))
            return state.finish(references)
        finally:
            state.close()

    def feedback(self, texts: Texts) -> Callable[[OutputTensor], Feedbacks]:
        """Error feedback for each tensor, if the options have it."""
        options = self.options
        if not options.feeds_back:
            return lambda _: ()
        inputs = budget.FeedbackBudget.of(self.arranged, options.max_memory).inputs
        return FeedbackPass(self.arranged, texts.feedback, inputs).of

    def texts(self, folder: Path) -> Texts:
        """The texts of the options, as ids of the tokenizer in `folder`."""
        encode = Tokenizer.from_folder(folder).encode
        options = self.options
        calibration = options.calibration or options.check_text
        if calibration is None:
            raise InvalidRequestError("Comparing logits needs a text.")
        return make_texts(
            calibration,
            options.check_text,
            lambda text: encode(text, parse_special=True),
            max_context=self.arranged.config.max_context,
        )

    def _formats(self, found: Measurements) -> dict[str, MLXFormat | None]:
        """The formats of a plan with a target size."""
        if not self.options.targeted:
            return {}
        base = self.plan()
        limit = self.options.limit_bytes(base.num_weights)
        assert limit is not None
        return choose_formats(self.arranged, found.units, base, limit)

    def _rounding(self) -> str:
        """What an interrupted conversion must go on with; memory decides a part of it."""
        if not self.options.feeds_back:
            return "nearest"
        inputs = budget.FeedbackBudget.of(self.arranged, self.options.max_memory).inputs
        return f"error feedback over {inputs} inputs"

    def _write(
        self,
        place: Workplace,
        plan: ConversionPlan,
        journal: Journal,
        found: Measurements,
        texts: Texts | None,
    ) -> None:
        options, learns = self.options, self.options.learn_minutes is not None
        moments = budget.FeedbackBudget.of(self.arranged, options.max_memory)
        taken = moments.peak_bytes if options.feeds_back else 0
        memory = budget.MemoryBudget.of(options.max_memory, taken)
        done = sum(t.output.num_weights for t in plan.tensors if t.output.name in journal.tensors)
        written = WriteProgress(self.progress, plan.num_weights, done)
        writer = TensorWriter(
            self.arranged,
            memory,
            options.searched,
            found.importance,
            written.add,
            sampled=not options.check_tensors,
        )
        if texts is not None:
            writer.feedback = self.feedback(texts)
        self.source.forget(self.arranged.dropped)
        with ExitStack() as stack:
            stack.callback(writer.close)
            for name, tensors in plan.shards():
                path = place.model / name
                if not (path.exists() or partial_path(path).exists()):
                    journal.forget(name, [tensor.output.name for tensor in tensors])
                if name not in journal.shards and not path.exists():
                    write_shard(path, tensors, writer, journal)
                if not learns:
                    self._complete(path, tensors, journal, memory.block)
        if learns and texts is not None:
            self._learn(place, plan, texts)
            for name, tensors in plan.shards():
                if name not in journal.shards:
                    put_into_file(place.model / name, tensors, place.learned, journal)
                self._complete(place.model / name, tensors, journal, memory.block)

    def _complete(
        self, path: Path, tensors: list[PlannedTensor], journal: Journal, block: int
    ) -> None:
        """Check a file, and let go of what it was made of."""
        if path.name not in journal.shards:
            journal.add_shard(path.name, self._entries(path, tensors, journal, block))
        self.source.forget(s for t in tensors for s in t.output.sources)

    def _learn(self, place: Workplace, plan: ConversionPlan, texts: Texts) -> None:
        seconds = (self.options.learn_minutes or 0) * 60
        learning = LearningPass(
            self.arranged, plan, place.model, place.learned, texts.feedback, seconds
        )
        self._learned = learning.run(self.progress)

    def _entries(
        self, path: Path, tensors: list[PlannedTensor], journal: Journal, block: int
    ) -> list[dict[str, Any]]:
        if not self.options.check_tensors:
            return written_entries(tensors, journal)
        return checked_entries(
            path, tensors, self.arranged, journal, block=block, progress=self.progress
        )

    def _compare(self, place: Workplace, plan: ConversionPlan, texts: Texts) -> list[Any]:
        assert self.open_model is not None
        bits = judged_bits(plan)
        limit, least = self.options.max_kl or limit_for(bits), top1_for(bits)
        pairs = list(zip((texts.short, texts.long), place.references, strict=True))
        with self.open_model(place.model) as logits_of:
            found = []
            for number, (sequences, reference) in enumerate(pairs, 1):
                found.append(compare_logits(sequences, reference, logits_of, limit, least))
                self.progress("logits", number, len(pairs))
        return found


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def judged_bits(plan: ConversionPlan) -> float:
    """Bits per weight of the output, by which its logits are judged.

    A tensor that the recipe keeps counts with the bits that it has in the source, if these are
    more: nothing of it is to be lost.
    """
    keep = plan.recipe.keep
    num_bytes = sum(
        max(tensor.num_bytes, tensor.output.stored_bytes)
        if keep and (tensor.output.quantised or tensor.form is None)
        else tensor.num_bytes
        for tensor in plan.tensors
    )
    return num_bytes * 8 / plan.num_weights


def check_same_plan(place: Workplace, plan: ConversionPlan) -> None:
    """The plan itself, kept beside the journal: a different version may plan differently."""
    path, data = place.plan, dumped(plan).encode()
    if path.exists() and path.read_bytes() != data:
        raise ConversionError(
            "This version of mlxinfer plans otherwise than the one that was interrupted; use "
            "--restart to begin anew."
        )
    write_file(path, data)
