"""Writes the files of a plan, and a journal of what is done.

A kill at any moment loses little: the journal names the tensors and files that are on the disk. Its
first line identifies the conversion. A kill may leave an incomplete last line, which is dropped.

Tensors are read, quantised and written a block of rows at a time. One thread reads and writes, and
MLX is used by it alone; the other threads quantise with numpy. So memory depends on the size of a
block and the number of threads, not on the size of a tensor. A finished file is compared with the
source.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
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
from .arrange import ArrangedSource, OutputTensor
from .arrays import Floats, as_numpy, dtype_name, narrow, widen
from .calibration.feedback import Feedbacks, Statistics
from .files import ShardFile, damaged
from .plan import CACHED_BYTES, ConversionPlan, MemoryBudget, PlannedTensor
from .quantise import (
    SAMPLED,
    ErrorFeedback,
    ErrorStats,
    QuantisationMethod,
    compare,
    quantise,
    rows_at_once,
    squares_of,
    total,
)
from .read import MLXFormat
from .recipes import name_of, parse_format
from .verify import Progress, ScaleLoss, as_written, check_shard, confirm, copy_error

Arrays = list[NDArray[Any]]
Wrote = Callable[[int], None]  # called with the number of weights written

VERSION = 4  # of the journal; another mlxinfer may plan otherwise


class Journal:
    """Append-only journal.

    Its contents are `formats` that measuring has chosen and `tensors`, both by name of the tensor,
    and `shards` by file name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start: dict[str, Any] = {}
        self.formats: dict[str, MLXFormat | None] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self.shards: dict[str, list[dict[str, Any]]] = {}
        if path.exists():
            self._load()

    def begin(self, start: dict[str, Any]) -> None:
        """Record which conversion this is, or check that it is the interrupted one."""
        start = {"version": f"{VERSION} of mlxinfer {version('mlxinfer')}", **start}
        if not self.start:
            self.start = start
            self._append([start])
            return
        for key, value in start.items():
            if self.start.get(key) != value:
                raise ConversionError(_changed(key, self.start.get(key), value))

    def add_formats(self, formats: dict[str, MLXFormat | None]) -> None:
        """These formats meet the target; an interrupted conversion does not measure again."""
        self.formats = formats
        self._append([{"formats": {name: name_of(form) for name, form in formats.items()}}])

    def add_tensors(self, entries: dict[str, dict[str, Any]]) -> None:
        self.tensors |= entries
        self._append([{"tensor": name, **entry} for name, entry in entries.items()])

    def add_shard(self, name: str, checked: list[dict[str, Any]]) -> None:
        """This file is whole, and what reading it again found."""
        self.shards[name] = checked
        self._append([{"shard": name, "checked": checked}])

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            self._take([_object(json.loads(line)) for line in whole.splitlines()])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
            elif "formats" in line:
                formats = line["formats"].items()
                self.formats = {name: parse_format(form) for name, form in formats}
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
            for block in self.arranged.blocks(tensor.output, self._block_size(tensor, known)):
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

    def _block_size(self, tensor: PlannedTensor, known: Statistics) -> int:
        """Numbers of a block: whole tiles of rows, where memory allows them."""
        size = self.budget.block
        if known.feedbacks:
            whole = _fed_rows(tensor.output) * tensor.output.shape[-1]
            size -= size % whole if size >= whole else 0
        return size

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
                tensor.form,
                tensor.dtype,
                self.searched,
                importance,
                rows=_fed_rows(tensor.output),
                sampled=self.sampled,
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
        widened = widen(narrowed, tensor.dtype)
        _check_fits(widened, tensor)
        return [narrowed], compare(widened, values)

    def _copy(self, tensor: PlannedTensor, target: "_Target") -> None:
        """The source's own codes; scales are rounded where float32 alone holds them."""
        loss = ScaleLoss()
        for packed in self.arranged.packed_blocks(tensor.output, self.budget.block):
            parts = loss.narrowed(packed, tensor)
            error = copy_error(packed, parts, tensor, every=SAMPLED)
            self.wrote(target.take([as_numpy(part) for part in parts], error))
        loss.check(tensor)


def _fed_rows(output: OutputTensor) -> int:
    """Rows of a matrix, or of one expert's, that are rounded together with error feedback."""
    return rows_at_once(*output.shape[-2:])


def _by_expert(
    output: OutputTensor, feedbacks: Feedbacks, first: int, count: int
) -> list[tuple[slice, ErrorFeedback | None]]:
    """Rows of a block of `count` rows from `first` on, by the feedback of their expert."""
    if not feedbacks:
        return [(slice(0, count), None)]
    height = prod(output.shape[:-1]) // len(feedbacks)
    spans, row = [], 0
    while row < count:
        expert, inside = divmod(first + row, height)
        end = min(count, row + height - inside)
        spans.append((slice(row, end), feedbacks[expert]))
        row = end
    return spans


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
    """Let MLX keep hardly any freed memory: blocks of all sizes come and go."""
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
    """Note in the journal what is on the disk, but not too often: each note waits for the disk."""
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
    """For the report, as reading a finished file finds them, `block` numbers at a time."""
    entries, done = [], 0
    count = sum(tensor.output.num_weights for tensor in tensors)

    def tell(weights: int) -> None:
        nonlocal done
        done += weights
        progress(f"check {path.name}", done, count)

    tell(0)
    sums = check_shard(path, tensors, arranged, block, tell)
    for tensor, checked in zip(tensors, sums, strict=True):
        confirm(checked, *_journalled(journal, tensor))
        entries.append(checked)
    return entries


def _journalled(journal: Journal, tensor: PlannedTensor) -> tuple[ErrorStats, list[int]]:
    try:
        entry = journal.tensors[tensor.output.name]
        return ErrorStats(**entry["error"]), entry["checksums"]
    except (KeyError, TypeError) as error:
        raise damaged(journal.path) from error
