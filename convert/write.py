"""Writes a plan into a folder, so that a kill at any moment loses little: what is written, what is
known of it, and what is still to be done.

    OUT.partial/lock           held while a process works here
    OUT.partial/journal.jsonl  what is done: tensors and files that are synced to the disk
    OUT.partial/model/         renamed to OUT at the end

OUT exists only when it is complete. Nothing else in OUT.partial is ever deleted. The first line of
the journal identifies the conversion; an incomplete last line, left by a kill, is dropped.

Tensors are read, quantised and written a block of rows at a time. One thread reads (MLX is used by
it alone) and writes; the others quantise with numpy. Memory is bounded by the size of a block and
the number of threads, not by the size of a tensor. A finished file is compared with the source.
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, ConversionError, shown
from ..memory import human_bytes
from .arrange import ArrangedSource, OutputTensor
from .arrays import Floats, as_numpy, dtype_name, narrow, widen
from .calibration.feedback import Feedbacks, Statistics
from .files import ShardFile, damaged, sync_folder
from .plan import CACHED_BYTES, ConversionPlan, MemoryBudget, PlannedTensor
from .quantise import (
    ErrorFeedback,
    ErrorStats,
    QuantisationMethod,
    compare,
    quantise,
    squares_of,
    total,
)
from .verify import Progress, as_kept, as_written, check_shard, confirm

Arrays = list[NDArray[Any]]
Wrote = Callable[[int], None]  # called with the number of weights written

SPARE_BYTES = 64 << 20  # left free on the disk
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_MADE = ("model", "measured.json", "learned", "short.logits", "long.logits")
_OURS = (*_MADE, *(f"{name}.partial" for name in _MADE), "journal.jsonl", "lock")  # lock goes last
_MARKS = tuple(
    name for name in _OURS if not name.startswith("model")
)  # "model" alone proves nothing
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders of one conversion."""

    out: Path

    @property
    def root(self) -> Path:
        """Beside the output, so that moving it is one rename.

        Raises:
            ConversionError: the output has no name.
        """
        if not self.out.name:
            raise ConversionError(
                f"{str(self.out)!r} has no name; name a folder that is not there."
            )
        return self.out.with_name(self.out.name + ".partial")

    @property
    def model(self) -> Path:
        """Becomes the output folder."""
        return self.root / "model"

    @property
    def journal(self) -> Path:
        """Of what is done."""
        return self.root / "journal.jsonl"

    @property
    def measured(self) -> Path:
        """The formats that follow from measuring."""
        return self.root / "measured.json"

    @property
    def learned(self) -> Path:
        """A file for each layer with learned scales."""
        return self.root / "learned"

    @property
    def references(self) -> tuple[Path, Path]:
        """Logits of the source, of short and of long contexts."""
        return self.root / "short.logits", self.root / "long.logits"

    def publish(self) -> None:
        """Make the finished folder the output."""
        if self.out.exists():
            raise ConversionError(f"{self.out} came to be while it was being converted to.")
        sync_folder(self.model)
        os.rename(self.model, self.out)
        sync_folder(self.out.parent)
        self.tidy_up()

    def tidy_up(self) -> None:
        """Delete the files of a conversion; the folder stays if it holds others."""
        for name in _OURS:
            _delete(self.root / name)
        with suppress(OSError):  # not empty, or another process has made its lock
            self.root.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_place(place: Workplace, source: Path | None) -> None:
    """Check that `place` may be used: its contents are deleted in the end.

    Raises:
        ConversionError: it is the source, inside it or around it, of another program, or no folder.
    """
    if source is not None:
        _check_apart(place, source)
    kind = "link" if place.root.is_symlink() else "file"
    if place.root.is_symlink() or (place.root.exists() and not place.root.is_dir()):
        raise ConversionError(
            f"{place.root}, where this conversion would work, is a {kind}; expected a folder or "
            "nothing. Move it or choose another name for the output; nothing was changed."
        )
    there = [path.name for path in place.root.iterdir()] if place.root.is_dir() else []
    if there and not any(name in _MARKS for name in there):
        raise ConversionError(
            f"{place.root}, where this conversion would work, is there and not of mlxinfer: it "
            f"holds {shown(min(there))}. Move it or choose another name for the output; nothing "
            "was changed."
        )


def _check_apart(place: Workplace, source: Path) -> None:
    root, theirs = place.root.resolve(), source.resolve()
    if root.is_relative_to(theirs) or theirs.is_relative_to(root):
        where = "is" if root == theirs else "is inside" if root in theirs.parents else "holds"
        raise ConversionError(
            f"The source {source} {where} {place.root}, the folder that this conversion would work "
            "in and delete; choose another name for the output. Nothing was changed."
        )


def check_target(place: Workplace, source: Path | None, needed_bytes: int) -> None:
    """Check that the output and the working folder can be written.

    Raises:
        ConversionError: it exists, is the source or inside it, cannot be written, or the disk has
            no room for `needed_bytes`.
    """
    out = place.out
    if source is not None and out.resolve().is_relative_to(source.resolve()):
        raise ConversionError(
            f"{out} is {'' if out.resolve() == source.resolve() else 'inside '}the source; choose "
            "a folder elsewhere."
        )
    check_place(place, source)
    if out.exists() or out.is_symlink():
        raise ConversionError(
            f"{out} exists already. Delete it or choose another name; nothing was changed."
        )
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConversionError(f"There is no folder {parent} to put {out.name} into.")
    free = shutil.disk_usage(parent).free
    if needed_bytes + SPARE_BYTES > free:
        raise ConversionError(
            f"{out} needs {human_bytes(needed_bytes)} more, and {human_bytes(SPARE_BYTES)} are to "
            f"stay free, but the disk has {human_bytes(free)} free. Make room or choose another "
            "disk."
        )


@contextmanager
def working(place: Workplace, *, resume: bool, restart: bool) -> Iterator[None]:
    """Hold the workplace, made if need be.

    Raises:
        ConversionError: another process is there, an interrupted conversion is there and neither
            `resume` nor `restart` was asked for, or the disk is full or read-only.
    """
    with disk_failures(place):
        interrupted = place.journal.exists()
        place.root.mkdir(exist_ok=True)
        lock = os.open(place.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(lock, place)
        except ConversionError:
            os.close(lock)
            raise
        try:
            if interrupted and not (resume or restart):
                raise ConversionError(
                    f"{place.root} holds an unfinished conversion: --resume goes on with it, "
                    "--restart begins anew."
                )
            if restart or not interrupted:
                _clear(place)
            place.model.mkdir(exist_ok=True)
            yield
        finally:
            os.close(lock)
            if not place.journal.exists():  # nothing was begun
                place.tidy_up()


@contextmanager
def disk_failures(place: Workplace) -> Iterator[None]:
    """Turn what a disk refuses into a ConversionError; other OSErrors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ConversionError(
                f"The disk is full; what is written is kept in {place.root}. Make room, then run "
                "the same command with --resume."
            ) from error
        if error.errno in _READ_ONLY:
            raise ConversionError(
                f"{place.out.absolute().parent} cannot be written ({error.strerror})."
            ) from error
        raise


def _lock(lock: int, place: Workplace) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConversionError(
            f"Another process is converting to {place.out}; wait for it, or choose another name."
        ) from None


def _clear(place: Workplace) -> None:
    """Delete what an earlier conversion left, except the lock that this process holds."""
    for name in _OURS:
        if name != "lock":
            _delete(place.root / name)


VERSION = 3  # of the journal; another mlxinfer may plan otherwise


class Journal:
    """Append-only journal; `tensors` by name and `shards` by file name are its contents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start: dict[str, Any] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self.shards: dict[str, list[dict[str, Any]]] = {}
        if path.exists():
            self._load()

    def begin(self, start: dict[str, Any]) -> None:
        """Record which conversion this is, or check that it is the interrupted one.

        Raises:
            ConversionError: it is another one.
        """
        start = {"version": f"{VERSION} of mlxinfer {version('mlxinfer')}", **start}
        if not self.start:
            self.start = start
            self._append([start])
            return
        for key, value in start.items():
            if self.start.get(key) != value:
                raise ConversionError(_changed(key, self.start.get(key), value))

    def add_tensors(self, entries: dict[str, dict[str, Any]]) -> None:
        """These tensors are on the disk."""
        self.tensors |= entries
        self._append([{"tensor": name, **entry} for name, entry in entries.items()])

    def add_shard(self, name: str, checked: list[dict[str, Any]]) -> None:
        """This file is whole, and what reading it again found."""
        self.shards[name] = checked
        self._append([{"shard": name, "checked": checked}])

    def forget(self, shard: str, tensors: list[str]) -> None:
        """The file with these tensors is gone: it was deleted or moved."""
        if shard in self.shards or not self.tensors.keys().isdisjoint(tensors):
            self._drop(shard, tensors)
            self._append([{"gone": shard, "tensors": tensors}])

    def _drop(self, shard: str, tensors: list[str]) -> None:
        self.shards.pop(shard, None)
        for name in tensors:
            self.tensors.pop(name, None)

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            self._take([_object(json.loads(line)) for line in whole.splitlines()])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(self.path) from error
        if len(whole) < len(data):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def _take(self, lines: list[dict[str, Any]]) -> None:
        """Read the lines; the first is the start."""
        if lines and "version" not in lines[0]:
            raise ValueError("the first line says nothing of a conversion")
        self.start = lines[0] if lines else {}
        for line in lines[1:]:
            if "tensor" in line:
                self.tensors[line.pop("tensor")] = line
            elif "gone" in line:
                self._drop(line["gone"], line["tensors"])
            else:
                self.shards[line["shard"]] = [_object(entry) for entry in line["checked"]]

    def _append(self, lines: list[dict[str, Any]]) -> None:
        with self.path.open("ab") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{shown(value)} is no object")
    return value


def _changed(key: str, before: object, now: object) -> str:
    if key == "source":
        return (
            "The source has changed since this conversion was interrupted: what is written does "
            "not fit the rest. Use --restart to begin anew."
        )
    plain = isinstance(before, (str, int, float)) and isinstance(now, (str, int, float))
    what = f"{key}: {before}, now {now}" if plain else key
    return (
        f"The unfinished conversion had other options ({what}). Give the same, or --restart to "
        "begin anew."
    )


@dataclass(slots=True)
class TensorWriter:
    """Writes tensors, one after the other; `close` it."""

    arranged: ArrangedSource
    budget: MemoryBudget
    searched: bool
    wrote: Wrote = lambda _: None
    statistics: Callable[[OutputTensor], Statistics] = lambda _: Statistics()
    sampled: bool = False  # the report has the errors of a part of the rows
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.budget.workers, "convert")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def write(self, tensor: PlannedTensor, file: ShardFile) -> dict[str, Any]:
        """Put one tensor into its file; returns what the journal notes.

        That is its `error`, the `checksums` of its arrays, and how many of its experts were rounded
        to the `nearest` for want of tokens.
        """
        target, known = _Target(tensor, file), Statistics()
        if tensor.packed:
            self._copy(tensor, target)
        else:
            if tensor.form is not None:
                known = self.statistics(tensor.output)
            self._spread(tensor, target, known)
        error, checksums = asdict(target.error), target.checksums
        return {"error": error, "checksums": checksums, "nearest": known.nearest}

    def _spread(self, tensor: PlannedTensor, target: "_Target", known: Statistics) -> None:
        """Pass blocks to the threads, one to each at a time, and write the results in order."""
        running: deque[Future[tuple[Arrays, ErrorStats]]] = deque()
        row = 0
        try:
            for block in self.arranged.blocks(tensor.output, self.budget.block):
                if len(running) >= self.budget.workers:
                    self.wrote(target.take(*running.popleft().result()))
                raw = as_numpy(block)
                parts = _by_expert(tensor.output, known.feedbacks, row, len(raw))
                job = self._pool.submit(
                    self._block, tensor, raw, dtype_name(block), known.importance, parts
                )
                running.append(job)
                row += len(raw)
            while running:
                self.wrote(target.take(*running.popleft().result()))
        finally:
            for job in running:
                job.cancel()

    def _block(
        self,
        tensor: PlannedTensor,
        raw: NDArray[np.generic],
        dtype: str,
        importance: Floats | None,
        parts: Sequence[tuple[slice, ErrorFeedback | None]],
    ) -> tuple[Arrays, ErrorStats]:
        """Quantise a block (R, in_dims). Runs in the threads.

        `parts`: its rows by the feedback that they are rounded with.
        """
        values = widen(raw, dtype)
        _check_finite(values, tensor, "holds NaN or infinity: the checkpoint is damaged")
        if tensor.form is not None:
            method = QuantisationMethod(
                tensor.form, tensor.dtype, self.searched, importance, None, self.sampled
            )
            return _joined(
                [
                    _quantised(values[rows], tensor, replace(method, feedback=feedback))
                    for rows, feedback in parts
                ]
            )
        if dtype == tensor.dtype:
            return [raw], ErrorStats(energy=squares_of(values))
        with np.errstate(over="ignore"):
            narrowed = narrow(values, tensor.dtype)
        found = widen(narrowed, tensor.dtype)
        _check_fits(found, tensor)
        return [narrowed], compare(found, values)

    def _copy(self, tensor: PlannedTensor, target: "_Target") -> None:
        """The source's own codes; scales are rounded where float32 alone holds them."""
        for name in tensor.output.sources:
            kept = as_kept(self.arranged.source.read_packed(name), tensor)
            target.take([as_numpy(part) for part in kept], ErrorStats())
            self.wrote(tensor.output.num_weights // len(tensor.output.sources))


def _by_expert(
    output: OutputTensor, feedbacks: Feedbacks, first: int, count: int
) -> list[tuple[slice, ErrorFeedback | None]]:
    """Rows of a block of `count` rows from `first` on, by the feedback of their expert."""
    if not feedbacks:
        return [(slice(0, count), None)]
    height = prod(output.shape[:-1]) // len(feedbacks)
    found, row = [], 0
    while row < count:
        expert, inside = divmod(first + row, height)
        end = min(count, row + height - inside)
        found.append((slice(row, end), feedbacks[expert]))
        row = end
    return found


def _joined(parts: Sequence[tuple[Arrays, ErrorStats]]) -> tuple[Arrays, ErrorStats]:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(arrays for arrays, _ in parts), strict=True)
    return [np.concatenate(column) for column in columns], total(error for _, error in parts)


def _quantised(
    values: Floats, tensor: PlannedTensor, method: QuantisationMethod
) -> tuple[Arrays, ErrorStats]:
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at below
        rows, error = quantise(values, method)
    if rows.biases is None:
        return [rows.weight, rows.scales], error
    for part in (rows.scales, rows.biases):
        _check_fits(widen(part, tensor.dtype), tensor)
    return [rows.weight, rows.scales, rows.biases], error


def _check_fits(values: Floats, tensor: PlannedTensor) -> None:
    _check_finite(values, tensor, f"is too large for {tensor.dtype}: choose bfloat16")


def _check_finite(values: Floats, tensor: PlannedTensor, what: str) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{tensor.output.name} {what}.")


class _Target:
    """The arrays of one tensor, each growing in its place in the file."""

    def __init__(self, tensor: PlannedTensor, file: ShardFile) -> None:
        self.error = ErrorStats()
        self.checksums = [0] * len(tensor.arrays)
        self._offsets = [0] * len(tensor.arrays)
        self._names = [array.name for array in tensor.arrays]
        self._file = file
        self._weights = tensor.output.num_weights
        self._bytes = tensor.arrays[0].num_bytes

    def take(self, arrays: Arrays, error: ErrorStats) -> int:
        """The next rows; returns how many numbers they stand for."""
        self.error = self.error + error
        for index, array in enumerate(arrays):
            data = np.ascontiguousarray(array)
            self.checksums[index] = crc32(
                data.reshape(-1).view(np.uint8).data, self.checksums[index]
            )
            self._offsets[index] += self._file.write(self._names[index], self._offsets[index], data)
        return arrays[0].nbytes * self._weights // max(1, self._bytes)


@contextmanager
def little_cached() -> Iterator[None]:
    """Let MLX keep hardly anything of what was freed: blocks of all sizes come and go."""
    before = mx.set_cache_limit(CACHED_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


CHECKPOINT_BYTES = 128 << 20  # written between two lines of the journal
CHECKPOINT_S = 5.0


def write_shard(
    path: Path,
    plan: ConversionPlan,
    tensors: list[PlannedTensor],
    writer: TensorWriter,
    journal: Journal,
) -> None:
    """All tensors of one file that the journal does not have; then the file has its name."""
    with closing(ShardFile(path, plan.pieces(tensors))) as file:
        with checkpoints(file, journal) as record:
            for tensor in tensors:
                if tensor.output.name not in journal.tensors:
                    record(tensor, writer.write(tensor, file))
        file.finish()


@contextmanager
def checkpoints(
    file: ShardFile, journal: Journal
) -> Iterator[Callable[[PlannedTensor, dict[str, Any]], None]]:
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

    def record(tensor: PlannedTensor, entry: dict[str, Any]) -> None:
        nonlocal size
        pending[tensor.output.name] = entry
        size += tensor.num_bytes
        if size >= CHECKPOINT_BYTES or time.monotonic() - started >= CHECKPOINT_S:
            settle()

    yield record
    settle()


def written_entries(tensors: list[PlannedTensor], journal: Journal) -> list[dict[str, Any]]:
    """For the report, as writing found them."""
    return [as_written(tensor, *_journalled(journal, tensor)) for tensor in tensors]


def checked_entries(
    path: Path,
    tensors: list[PlannedTensor],
    arranged: ArrangedSource,
    journal: Journal,
    *,
    block: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """For the report, as reading a finished file finds them, `block` numbers at a time.

    Raises:
        ConversionError: the file is not what was written.
    """
    entries = []
    found = check_shard(path, tensors, arranged, block)
    for number, (tensor, checked) in enumerate(zip(tensors, found, strict=True), 1):
        confirm(checked, *_journalled(journal, tensor))
        entries.append(checked)
        progress(f"check {path.name}", number, len(tensors))
    return entries


def _journalled(journal: Journal, tensor: PlannedTensor) -> tuple[ErrorStats, list[int]]:
    try:
        entry = journal.tensors[tensor.output.name]
        return ErrorStats(**entry["error"]), entry["checksums"]
    except (KeyError, TypeError) as error:
        raise damaged(journal.path) from error
