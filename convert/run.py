"""A conversion, from a source to a complete folder.

plan -> measure, if a target size chooses the formats -> write, file by file, each compared with the
source when it is complete -> logits -> report -> publish. Every step continues from the
state that an interrupted run has left.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConversionError, InvalidRequestError, ModelError, UnsupportedModelError
from ..memory import give_back_memory, human_bytes
from ..models.config import load_config, normalise
from ..models.jsonfields import Fields, read_json
from ..models.registry import is_native
from ..text import Tokenizer
from .arrange import ArrangedSource, arrange, check_complete, check_tower
from .calibration.allocation import choose_formats, least_bytes
from .calibration.estimate import estimated_seconds
from .calibration.feedback import CalibrationPass
from .calibration.logits import LogitCheck, compare_logits, limits_for, reachable_limits
from .calibration.measure import measure_units
from .calibration.texts import SEQUENCES, Texts, beginning, checked_positions, make_texts
from .files import damaged, partial_path
from .mlx_lm import passed_over, read_by_mlx_lm
from .plan import (
    TOKEN_BYTES,
    ConversionPlan,
    MemoryBudget,
    PlannedTensor,
    disk_bytes,
    make_budget,
    make_plan,
)
from .read import MLXFormat, SourceModel
from .read.folder import open_folder
from .recipes import ConversionOptions, identity
from .report import RUN, RUN_MLX_LM, ConversionReport, make_report, write_card
from .sidefiles import config_json, has_tokenizer, index_json, write_json, write_side_files
from .verify import Progress
from .workplace import Workplace, check_target, working
from .write import (
    Journal,
    TensorWriter,
    checked_entries,
    little_cached,
    write_shard,
    written_entries,
)
from .zoo import NOTE as MADE
from .zoo import WHOLE, arrange_made, check_opens, refuse_layers, whole_because

NO_TOKENIZER = (
    "There is no tokenizer: add the model's tokenizer.json, or convert with --tokenizer FOLDER."
)
FEW_TOKENS_SEEN = (
    "{count} matrices of experts saw too few tokens of the calibration text for error feedback "
    "and were rounded to the nearest: a longer --calibration text would help them."
)
PASSED_OVER = (
    "mlx-lm's definition of {kind} does not read {keys}: it refuses this folder, or gives other "
    "logits."
)
NOT_MLX_LM = "mlx-lm does not read {kind} as transformers lays it out: this folder is for mlxinfer."
STACKED = (
    "transformers does not find the experts of this folder, which lie in stacks as MLX has them: "
    "load it with mlxinfer or mlx-lm, or convert with --split-experts, which stores each by itself."
)
AHEAD = (
    "{count} tensors ({first} …) predict tokens further ahead: they are kept for speculation; "
    "a forward pass leaves them out."
)


@dataclass(slots=True)
class Conversion:
    """One source on its way to one folder."""

    source: SourceModel
    out: Path
    options: ConversionOptions
    compares: bool = False  # the logits of source and output
    progress: Progress = lambda *_: None
    arranged: ArrangedSource = field(init=False)
    budget: MemoryBudget = field(init=False)

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for a target that no formats meet, or a missing part."""
        if whole_because(self.source) is not None:
            refuse_layers(self.source, self.options, comparing=self.compares)
        native = is_native(self.source.config)
        self.arranged = arrange(self.source) if native else arrange_made(self.source)
        if self._comparing and not (self.options.calibration or self.options.check_text):
            raise InvalidRequestError(
                "Comparing logits needs a text. Use calibration, or leave out the check.",
                param="calibration",
            )
        plan = self.plan()
        self.budget = make_budget(self.arranged, plan, self.options, comparing=self._comparing)
        limit = plan.limit_bytes(self.options)
        if limit is None:
            return
        least = least_bytes(self.arranged, self.options.recipe, plan)
        if least > limit:
            raise InvalidRequestError(
                f"The target is {human_bytes(limit)}, but the smallest formats take "
                f"{human_bytes(least)} ({least * 8 / plan.num_weights:.2f} bits per weight).",
                param="target",
            )

    def plan(self, formats: dict[str, MLXFormat | None] | None = None) -> ConversionPlan:
        options = self.options
        return make_plan(
            self.arranged,
            options.recipe,
            chosen=formats,
            shard_bytes=options.shard_bytes,
            by_layer=options.calibration is not None,
            split_experts=options.split_experts,
        )

    def disk_bytes(self) -> int:
        return disk_bytes(self.arranged, self.plan(), self.options, comparing=self._comparing)

    def seconds(self) -> float:
        """How long it takes here, about, where a text is calibrated on; else 0."""
        with little_cached():
            return estimated_seconds(
                self.arranged, self.plan(), self.options, self.budget, comparing=self._comparing
            )

    def run(self, *, resume: bool = False, restart: bool = False) -> ConversionReport:
        """Convert."""
        place = Workplace(self.out)
        self.check_room()
        self._check_tokenizer()
        with working(place, resume=resume, restart=restart), little_cached():
            return self._run(place)

    @property
    def _comparing(self) -> bool:
        return self.compares and self._generates

    @property
    def _generates(self) -> bool:
        if self.arranged.definition is not None:
            return True
        config = self.arranged.family_config
        return not (config.without_lm_head or config.bidirectional)

    def check_room(self) -> None:
        """Raise if OUT cannot be made, or the disk or the memory is too small."""
        place = Workplace(self.out)
        label = Path(self.source.label) if Path(self.source.label).exists() else None
        files = [path for path in place.root.rglob("*") if path.is_file()]
        used_bytes = sum(path.stat().st_blocks * 512 for path in files)
        check_target(place, label, max(0, self.disk_bytes() - used_bytes))
        self.check_memory()

    def check_memory(self) -> None:
        """Raise if `max_memory` is too small."""
        limit, needed = self.options.max_memory, self.budget.peak_bytes
        if limit is not None and needed > limit:
            words = self.arranged.config.vocab_size
            raise InvalidRequestError(
                f"max_memory is {limit / 1e6:,.0f} MB, but about {needed / 1e6:,.0f} MB are "
                f"needed, {words * TOKEN_BYTES / 1e6:,.0f} MB of them for a tokenizer of "
                f"{words:,} tokens."
                + " Calibration and comparing logits hold one layer in memory; without both "
                "(--calibration none --check tensors) it may be enough." * self._needs_texts,
                param="max_memory",
            )

    @property
    def _needs_texts(self) -> bool:
        return self.options.calibration is not None or self._comparing

    def _check_tokenizer(self) -> None:
        """Raise if texts are needed and there is no tokenizer."""
        if self._needs_texts and not has_tokenizer(self.source.side_files()):
            raise ConversionError(
                f"{self.source.label} has no tokenizer. Calibration and comparing logits need one. "
                "Name a folder that has the model's tokenizer.json with --tokenizer FOLDER, or do "
                "without both: --calibration none --check tensors."
            )

    def _run(self, place: Workplace) -> ConversionReport:
        journal = Journal(place.journal)
        options = identity(self.options, comparing=self._comparing)
        journal.begin({"source": self.source.fingerprint, **options, "rounding": self._rounding()})
        self.progress("tokenizer", 0, 2)
        write_side_files(place.model, self.source)
        give_back_memory()
        self.progress("tokenizer", 1, 2)
        tokenizer, unloadable = self._check_side_files(place)
        texts = None
        if self._needs_texts:
            texts = self._texts(tokenizer or Tokenizer.from_folder(place.model))
        del tokenizer  # one of 262,144 tokens takes hundreds of megabytes
        give_back_memory()
        self.progress("tokenizer", 2, 2)
        plan = self.plan(self._formats(journal, texts))
        write_json(place.model / "config.json", config_json(self.arranged, plan))
        write_json(place.model / "model.safetensors.index.json", index_json(plan))
        self._check_opens(place.model, plan)
        self._write(place, plan, journal, texts)
        tensors = [entry for name, _ in plan.shards() for entry in journal.shards[name]]
        report = make_report(self.source, plan, tensors, compared=self.options.check_tensors)
        report.loads = unloadable is None
        if self._generates:
            report.commands = [RUN, *[RUN_MLX_LM] * self._read_by_mlx_lm]
        report.notes += self._notes(plan, journal, unloadable)
        if self._comparing and texts is not None:
            report = replace(report, logits=self._compare(place, plan, texts))
        write_json(place.model / "report.json", report.as_dict())
        write_card(place.model, report, self.source)
        place.publish()
        return report

    def _notes(self, plan: ConversionPlan, journal: Journal, unloadable: str | None) -> list[str]:
        notes = []
        if not has_tokenizer(self.source.side_files()):
            notes.append(NO_TOKENIZER)
        if unloadable is not None:
            notes.append(unloadable)
        kind = self.arranged.config.model_type
        if self.arranged.definition is not None:
            notes.append(MADE.format(kind=kind))
        elif not self._read_by_mlx_lm:
            notes.append(NOT_MLX_LM.format(kind=kind))
        elif keys := passed_over(self._written_config(plan), self.arranged.family_config):
            notes.append(PASSED_OVER.format(kind=kind, keys=" and ".join(keys)))
        if self.arranged.definition is None and (reason := whole_because(self.source)):
            notes.append(WHOLE.format(kind=kind, reason=reason))
        if plan.stacks_for_mlx:
            notes.append(STACKED)
        if ahead := [tensor.output.name for tensor in plan.tensors if tensor.output.ahead]:
            notes.append(AHEAD.format(count=len(ahead), first=min(ahead)))
        if few := sum(entry.get("nearest", 0) for entry in journal.tensors.values()):
            notes.append(FEW_TOKENS_SEEN.format(count=few))
        if anew := [t for t in plan.tensors if t.form and not t.packed and t.output.quantised]:
            formats = ", ".join(dict.fromkeys(tensor.output.stored for tensor in anew))
            notes.append(
                f"{len(anew)} of {len(plan.tensors)} tensors were quantised already ({formats}) "
                "and now are anew: from weights that never were, the result would be better."
            )
        return notes

    @property
    def _read_by_mlx_lm(self) -> bool:
        if self.arranged.definition is not None:
            return True
        return read_by_mlx_lm(self.source, self.arranged.family_config)

    def _written_config(self, plan: ConversionPlan) -> dict[str, Any]:
        written = config_json(self.arranged, plan)
        text: dict[str, Any] = written.get("text_config", written)
        return text

    def _check_side_files(self, place: Workplace) -> tuple[Tokenizer | None, str | None]:
        """Load config and tokenizer as loading the output will, before hours of work."""
        path = place.model / "generation_config.json"
        if self.arranged.definition is None:
            normalise(self.source.config, read_json(path) if path.is_file() else {})
        if not has_tokenizer(self.source.side_files()):
            return None, None
        try:
            return Tokenizer.from_folder(place.model), None
        except UnsupportedModelError as error:
            return None, str(error)

    def _check_opens(self, folder: Path, plan: ConversionPlan) -> None:
        """Raise ConversionError if the output would not load: its config is of another model."""
        shapes = {output.name: output.shape for output in self.arranged.outputs}
        try:
            if self.arranged.definition is not None:
                return check_opens(folder, plan, str(self.out))
            without_lm_head = self.arranged.family_config.without_lm_head
            config = replace(load_config(folder), without_lm_head=without_lm_head)
            check_complete(config, shapes, str(self.out))
            if any(output.seeing for output in self.arranged.outputs):
                whole = Fields(read_json(folder / "config.json"), "config.json")
                check_tower(whole, shapes, str(self.out))
        except ModelError as error:
            raise ConversionError(f"The result would not load: {error}") from error

    def _texts(self, tokenizer: Tokenizer) -> Texts:
        encode = partial(tokenizer.encode, parse_special=True)
        plain = partial(encode, add_special_tokens=False)
        options, config = self.options, self.arranged.config
        return make_texts(
            options.calibration or options.check_text or "",
            options.check_text,
            plain,
            begin=beginning(encode, plain),
            sequences=SEQUENCES,
            max_context=config.max_context,
            positions=checked_positions(config.vocab_size),
        )

    def _formats(self, journal: Journal, texts: Texts | None) -> dict[str, MLXFormat | None]:
        """The formats of a plan with a target size; an earlier run may have measured them."""
        base = self.plan()
        limit = base.limit_bytes(self.options)
        if limit is None or texts is None:
            return {}
        if journal.formats:
            return journal.formats
        units = measure_units(
            self.arranged,
            texts.calibration,
            self.options.recipe,
            self.budget.probes,
            lambda done, count: self.progress("measure", done, count),
        )
        formats = choose_formats(self.arranged, units, base, limit)
        journal.add_formats(formats)
        return formats

    def _rounding(self) -> str:
        """How weights are rounded: in part memory decides, and a resumed run must do the same."""
        if self.options.calibration is None:
            return "nearest"
        return f"{SEQUENCES} sequences, error feedback over {self.budget.inputs} inputs"

    def _write(
        self, place: Workplace, plan: ConversionPlan, journal: Journal, texts: Texts | None
    ) -> None:
        options = self.options
        done = sum(t.output.num_weights for t in plan.tensors if t.output.name in journal.tensors)

        def wrote(count: int) -> None:
            nonlocal done
            done += count
            self.progress("write", done, plan.num_weights)

        wrote(0)
        writer = TensorWriter(
            self.arranged, self.budget, options.searched, wrote, sampled=not options.check_tensors
        )
        statistics = None if texts is None else self._calibration(place, texts)
        if statistics is not None:
            writer.statistics = statistics.of
        with closing(writer):
            for name, tensors in plan.shards():
                path = place.model / name
                known = [t for t in tensors if t.output.name in journal.tensors]
                if known and not (path.exists() or partial_path(path).exists()):
                    raise damaged(path)  # it was deleted or moved
                if name not in journal.shards and not path.exists():
                    write_shard(path, plan, tensors, writer, journal)
                self._complete(path, tensors, journal)
        if statistics is not None:
            statistics.write_references()

    def _calibration(self, place: Workplace, texts: Texts) -> CalibrationPass:
        return CalibrationPass(
            self.arranged,
            texts,
            self.budget.inputs,
            calibrating=self.options.calibration is not None,
            references=place.references if self._comparing else (),
            progress=self.progress,
        )

    def _complete(self, path: Path, tensors: list[PlannedTensor], journal: Journal) -> None:
        if path.name in journal.shards:
            return
        if not self.options.check_tensors:
            entries = written_entries(tensors, journal)
        else:
            entries = checked_entries(
                path, tensors, self.arranged, journal,
                block=self.budget.block, progress=self.progress,
            )  # fmt: skip
        journal.add_shard(path.name, entries)

    def _compare(self, place: Workplace, plan: ConversionPlan, texts: Texts) -> list[LogitCheck]:
        """Run the output as it lies in its folder, and compare its logits with the source's."""
        output = arrange(open_folder(place.model))
        self._write_logits(output, texts, place.outputs, "output")
        usual = limits_for(judged_bits(plan))
        sequences = texts.short, texts.long
        files = zip(sequences, place.references, place.outputs, strict=True)
        checks = [compare_logits(*paths, *usual) for paths in files]
        if all(check.passed for check in checks):
            return checks
        tensors = {tensor.output.name: tensor for tensor in plan.tensors}
        self._write_logits(self.arranged, texts, place.nearest, "rounded source", tensors)
        files = zip(sequences, place.references, place.nearest, strict=True)
        limits = [reachable_limits(*paths, usual) for paths in files]
        return [
            replace(check, max_kl=max_kl, min_top1=min_top1)
            for check, (max_kl, min_top1) in zip(checks, limits, strict=True)
        ]

    def _write_logits(
        self,
        arranged: ArrangedSource,
        texts: Texts,
        paths: tuple[Path, Path],
        model: str,
        rounded: Mapping[str, PlannedTensor] | None = None,
    ) -> None:
        CalibrationPass(
            arranged,
            texts,
            0,
            calibrating=False,
            references=paths,
            rounded=rounded,
            progress=self.progress,
            model=model,
        ).write_references()


def judged_bits(plan: ConversionPlan) -> float:
    """Bits per weight of the output, by which its logits are judged.

    The tower does not count, because the logits are those of text. A tensor that the recipe keeps
    counts with at least the bits that it has in the source, because nothing of it may be lost.
    """
    keep = plan.recipe.keep
    tensors = [tensor for tensor in plan.tensors if not tensor.output.seeing]
    num_bytes = sum(
        max(tensor.num_bytes, tensor.output.stored_bytes)
        if keep and (tensor.output.quantised or tensor.form is None)
        else tensor.num_bytes
        for tensor in tensors
    )
    return num_bytes * 8 / sum(tensor.output.num_weights for tensor in tensors)
