"""The steps of a conversion, from a source to a folder that is complete. Knows no command line.

plan -> measure -> write, shard by shard, each compared with the source when it is whole -> logits
-> report -> publish. Every step finds what an interrupted one has left.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConversionError, InvalidRequestError
from ..text import Tokenizer
from . import measured as kept
from .allocate import allocate
from .arrange import Arranged, arrange
from .candidates import LAYER, choices
from .card import write_card
from .files import ShardFile, write_file
from .journal import Journal
from .logitcheck import LogitsOf, compare_logits, limit_for
from .measure import Measured, Pass
from .plan import SHARD_BYTES, Plan, Planned, dumped, make_plan
from .quantise import Error
from .read import MLXFormat, Source
from .recipes import Recipe
from .report import Report, make_report
from .sidefiles import config_json, index_json, write_json, write_side_files
from .texts import MAX_CHECKED, Texts, make_texts
from .verify import as_written, check_shard, confirm
from .workplace import Workplace, check_target, disk_failures, working
from .write import BASE_BYTES, Budget, TensorWriter, Written, little_cached

CHECKPOINT_BYTES = 128 << 20  # written between two lines of the journal
CHECKPOINT_S = 5.0
LAYER_COPIES = 3  # of a layer in float32 while it is measured: as read, joined, one changed

OpenModel = Callable[[Path], AbstractContextManager[LogitsOf]]
Progress = Callable[[str, int, int], None]  # step, how far, of how much


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What shapes the output, and how it is checked."""

    recipe: Recipe
    target_bpw: float | None = None
    target_bytes: int | None = None
    searched: bool = True  # scales by squared error; False: as mx.quantize
    calibration: str | None = None  # text; None: squared errors count alike
    check_text: str | None = None  # text; None: a part of the calibration text
    check_tensors: bool = True
    max_kl: float | None = None  # None: limit_for() the bits
    max_memory: int | None = None  # bytes
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.targeted and self.calibration is None:
            raise InvalidRequestError("A target size needs a text for calibration.")

    @property
    def targeted(self) -> bool:
        """Whether formats follow from a size."""
        return self.target_bpw is not None or self.target_bytes is not None


@dataclass(slots=True)
class Conversion:
    """One source on its way to one folder."""

    source: Source
    out: Path
    options: Options
    open_model: OpenModel | None = None  # None: logits are not checked
    progress: Progress = lambda *_: None
    look_again: Callable[[], str] | None = None  # the source's fingerprint as it is now
    arranged: Arranged = field(init=False)

    def __post_init__(self) -> None:
        self.arranged = arrange(self.source)

    def plan(self, formats: dict[str, MLXFormat | None] | None = None) -> Plan:
        """The plan as far as it is known: a target's formats follow from measuring."""
        options = self.options
        return make_plan(
            self.arranged, options.recipe, chosen=formats, shard_bytes=options.shard_bytes
        )

    def run(self, *, resume: bool = False, restart: bool = False) -> Report:
        """Convert.

        Raises:
            ConversionError: the target, the disk or what is written is not as it should be.
            CheckpointError: the source is broken.
        """
        label = Path(self.source.label) if self._is_local else None
        place = Workplace(self.out)
        check_target(self.out, label, self._needed_bytes(place))
        with (
            working(place, resume=resume, restart=restart),
            little_cached(),
            disk_failures(place),
        ):
            return self._run(place)

    def disk_bytes(self) -> int:
        """What the output and the logits that it is compared with take."""
        extra = 0
        if self.open_model is not None:
            extra += MAX_CHECKED * self.arranged.config.vocab_size * 4
        if not self._is_local and self._measures:  # read twice, so kept in between
            extra += sum(output.stored_bytes for output in self.arranged.outputs)
        return (self._limit_bytes() or self.plan().num_bytes) + extra

    @property
    def _is_local(self) -> bool:
        return Path(self.source.label).exists()

    @property
    def _measures(self) -> bool:
        return self.options.calibration is not None or self.open_model is not None

    def peak_bytes(self) -> int:
        """An estimate of the memory that is needed at most."""
        writing = Budget.of(self.options.max_memory).peak_bytes + self._largest_piece()
        if not self._measures:
            return writing
        return max(writing, BASE_BYTES + LAYER_COPIES * largest_layer(self.arranged) * 4)

    def _largest_piece(self) -> int:
        """One expert of a stack, and a tensor whose codes are copied, are read at once."""
        sizes = [0]
        for tensor in self.plan().tensors:
            info = self.source.tensors[tensor.output.sources[0]]
            if tensor.packed:
                sizes.append(tensor.num_bytes // len(tensor.output.sources))
            elif len(info.shape) > 2:
                sizes.append(tensor.output.num_weights // tensor.output.shape[0] * 4)
        return max(sizes)

    def _needed_bytes(self, place: Workplace) -> int:
        """The same, less what an interrupted run has left."""
        files = [path for path in place.root.rglob("*") if path.is_file()]
        return max(0, self.disk_bytes() - sum(path.stat().st_blocks * 512 for path in files))

    def _limit_bytes(self) -> int | None:
        """The target, if there is one."""
        options = self.options
        if options.target_bpw is not None:
            weights = sum(output.num_weights for output in self.arranged.outputs)
            return int(options.target_bpw * weights / 8)
        return options.target_bytes

    def _run(self, place: Workplace) -> Report:
        journal = Journal(place.journal)
        journal.begin({"source": self.source.fingerprint, **identity(self.options)})
        write_side_files(place.model, self.source)
        texts, found = self._measure(place)
        plan = self.plan(self._formats(found))
        check_same_plan(place, plan)
        write_json(place.model / "config.json", config_json(self.source, plan))
        write_json(place.model / "model.safetensors.index.json", index_json(plan))
        self._write(place, plan, journal, found)
        tensors = [entry for name, _ in plan.shards() for entry in journal.shards[name]]
        report = make_report(self.source, plan, tensors)
        if self.open_model is not None and texts is not None:
            report = replace(report, logits=self._compare(place, plan, texts))
        write_json(place.model / "report.json", report.as_dict())
        write_card(place.model, report, self.source)
        if self.look_again is not None and self.look_again() != self.source.fingerprint:
            raise ConversionError("The source changed while it was converted; use --restart.")
        place.publish()
        return report

    def _measure(self, place: Workplace) -> tuple[Texts | None, Measured]:
        """The pass over the model, unless nothing needs it or an earlier run has done it."""
        options = self.options
        if not self._measures:
            return None, Measured()
        texts = self._texts(place)
        references = reference_paths(place)
        if place.measured.exists():
            return texts, kept.load(place.measured, self.arranged)
        state = Pass(self.arranged, texts, options.recipe, probing=options.targeted)
        try:
            state.run(lambda done, count: self.progress("measure", done, count))
            found = state.finish(references)
        finally:
            state.close()
        if options.calibration is None:
            found.importance = {}
        kept.save(place.measured, found)
        return texts, found

    def _texts(self, place: Workplace) -> Texts:
        encode = Tokenizer.from_folder(place.model).encode
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

    def _formats(self, found: Measured) -> dict[str, MLXFormat | None]:
        """What a target decides."""
        if not self.options.targeted:
            return {}
        recipe, base = self.options.recipe, self.plan()
        units = [choices(unit, recipe, self.source.dtype) for unit in found.units]
        free = {name for unit in units for name in unit.names}
        fixed = sum(t.num_bytes for t in base.tensors if t.output.name not in free)
        limit = self._limit_bytes()
        assert limit is not None
        chosen = allocate(units, limit - fixed)
        pairs = zip(units, chosen, strict=True)
        return {name: choice.form for unit, choice in pairs for name in unit.names}

    def _write(self, place: Workplace, plan: Plan, journal: Journal, found: Measured) -> None:
        budget = Budget.of(self.options.max_memory)
        done = sum(t.output.num_weights for t in plan.tensors if t.output.name in journal.tensors)
        told = Told(self.progress, plan.num_weights, done)
        writer = TensorWriter(
            self.arranged, budget, self.options.searched, found.importance, told.add
        )
        with ExitStack() as stack:
            stack.callback(writer.close)
            for name, tensors in plan.shards():
                if name not in journal.shards:
                    path = place.model / name
                    if not path.exists():
                        write_shard(path, tensors, writer, journal)
                    journal.add_shard(name, self._checked(path, tensors, journal, budget))
                self.source.forget(s for t in tensors for s in t.output.sources)

    def _checked(
        self, path: Path, tensors: list[Planned], journal: Journal, budget: Budget
    ) -> list[dict[str, Any]]:
        if not self.options.check_tensors:
            written = ((tensor, *_journalled(journal, tensor)) for tensor in tensors)
            return [as_written(*entry).as_dict() for entry in written]
        entries = []
        found = check_shard(path, tensors, self.arranged, budget.block)
        for number, (tensor, checked) in enumerate(zip(tensors, found, strict=True), 1):
            confirm(checked, *_journalled(journal, tensor))
            entries.append(checked.as_dict())
            self.progress(f"check {path.name}", number, len(tensors))
        return entries

    def _compare(self, place: Workplace, plan: Plan, texts: Texts) -> list[Any]:
        assert self.open_model is not None
        limit = self.options.max_kl or limit_for(plan.bits_per_weight)
        pairs = list(zip((texts.short, texts.long), reference_paths(place), strict=True))
        with self.open_model(place.model) as logits_of:
            found = []
            for number, (sequences, reference) in enumerate(pairs, 1):
                found.append(compare_logits(sequences, reference, logits_of, limit))
                self.progress("logits", number, len(pairs))
        return found


@dataclass(slots=True)
class Told:
    """Counts numbers written, for whoever watches."""

    progress: Progress
    total: int
    done: int

    def add(self, count: int) -> None:
        """`count` more; called from several threads, so now and then one report is early."""
        self.done += count
        self.progress("write", self.done, self.total)


def write_shard(path: Path, tensors: list[Planned], writer: TensorWriter, journal: Journal) -> None:
    """All tensors of one file that the journal does not have; then the file has its name."""
    arrays = [array for tensor in tensors for array in tensor.arrays]
    with ShardFile(path, arrays) as file:
        with checkpoints(file, journal) as record:
            for tensor in tensors:
                if tensor.output.name not in journal.tensors:
                    record(tensor, writer.write(tensor, file))
        file.finish()


@contextmanager
def checkpoints(file: ShardFile, journal: Journal) -> Iterator[Callable[[Planned, Written], None]]:
    """Lines in the journal for what is on the disk, not too often: each waits for the disk."""
    pending: dict[str, dict[str, Any]] = {}
    size, started = 0, time.monotonic()

    def settle() -> None:
        nonlocal size, started
        if pending:
            file.sync()
            journal.add_tensors(pending)
            pending.clear()
        size, started = 0, time.monotonic()

    def record(tensor: Planned, written: Written) -> None:
        nonlocal size
        pending[tensor.output.name] = asdict(written)
        size += tensor.num_bytes
        if size >= CHECKPOINT_BYTES or time.monotonic() - started >= CHECKPOINT_S:
            settle()

    yield record
    settle()


def largest_layer(arranged: Arranged) -> int:
    """Weights of the largest decoder layer."""
    sizes: Counter[str] = Counter()
    for output in arranged.outputs:
        layer = LAYER.search(output.path)
        sizes[layer[1] if layer else ""] += output.num_weights if layer else 0
    return max(sizes.values())


def _journalled(journal: Journal, tensor: Planned) -> tuple[Error, list[int]]:
    entry = journal.tensors[tensor.output.name]
    return Error(**entry["error"]), entry["checksums"]


def identity(options: Options) -> dict[str, Any]:
    """What must be the same for an interrupted conversion to go on."""
    recipe = options.recipe
    return {
        "recipe": recipe.name,
        "overrides": [str(override) for override in recipe.overrides],
        "group size": str(recipe.base),
        "dtype": recipe.dtype,
        "keep format": recipe.keep,
        "target": [options.target_bpw, options.target_bytes],
        "scales": "searched" if options.searched else "extremes",
        "texts": [_digest(options.calibration), _digest(options.check_text)],
        "shards": options.shard_bytes,
        "check": options.check_tensors,
    }


def check_same_plan(place: Workplace, plan: Plan) -> None:
    """The plan itself, kept beside the journal: a different version may plan differently."""
    path, text = place.root / "plan.json", dumped(plan)
    if path.exists() and path.read_text() != text:
        raise ConversionError(
            "This version of mlxinfer plans otherwise than the one that was interrupted; use "
            "--restart to begin anew."
        )
    write_file(path, text.encode())


def reference_paths(place: Workplace) -> tuple[Path, Path]:
    """Logits of the source, of short and of long contexts."""
    return place.root / "short.npy", place.root / "long.npy"


def _digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


def read_report(folder: Path) -> dict[str, Any]:
    """report.json of a folder that was converted."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found
