"""Writes the tensors of a plan into files: read, quantised and written a block of rows at a time.

One thread reads (MLX is used by it alone) and writes; the others quantise with numpy. Memory is
bounded by the size of a block and the number of threads, not by the size of a tensor. The journal
records what is on the disk, and a finished file is compared with the source.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .arrange import ArrangedSource, OutputTensor
from .arrays import Floats, as_numpy, dtype_name, mx_dtype, narrow, widen
from .budget import CACHED_BYTES, MemoryBudget
from .calibration.feedback import Feedbacks
from .feedback import ErrorFeedback
from .files import ShardFile, damaged
from .journal import Journal
from .plan import PlannedTensor
from .quantise import ErrorStats, QuantisationMethod, compare, quantise, squares_of, total
from .verify import Progress, as_written, check_shard, confirm

Arrays = list[NDArray[Any]]
Wrote = Callable[[int], None]  # called with the number of weights written


@dataclass(slots=True)
class TensorWriter:
    """Writes tensors, one after the other; `close` it."""

    arranged: ArrangedSource
    budget: MemoryBudget
    searched: bool
    importance: Mapping[str, Floats]  # by path: (in_dims,), mean 1
    wrote: Wrote = lambda _: None
    feedback: Callable[[OutputTensor], Feedbacks] = lambda _: ()  # (): to the nearest
    sampled: bool = False  # the report has the errors of a part of the rows
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.budget.workers, "convert")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def write(self, tensor: PlannedTensor, file: ShardFile) -> "WrittenTensor":
        """Put one tensor into its file."""
        target, feedbacks = _Target(tensor, file), Feedbacks()
        if tensor.packed:
            self._copy(tensor, target)
        else:
            if tensor.form is not None:
                feedbacks = self.feedback(tensor.output)
            self._spread(tensor, target, feedbacks)
        return WrittenTensor(target.error, target.checksums, feedbacks.count(None))

    def _spread(self, tensor: PlannedTensor, target: "_Target", feedbacks: Feedbacks) -> None:
        """Pass blocks to the threads, one to each at a time, and write the results in order."""
        running: deque[Future[tuple[Arrays, ErrorStats]]] = deque()
        row = 0
        try:
            for block in self.arranged.blocks(tensor.output, self.budget.block):
                if len(running) >= self.budget.workers:
                    self.wrote(target.take(*running.popleft().result()))
                raw = as_numpy(block)
                parts = _by_expert(tensor.output, feedbacks, row, len(raw))
                job = self._pool.submit(self._block, tensor, raw, dtype_name(block), parts)
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
        parts: Sequence[tuple[slice, ErrorFeedback | None]],
    ) -> tuple[Arrays, ErrorStats]:
        """Quantise a block (R, in_dims). Runs in the threads.

        `parts`: its rows by the feedback that they are rounded with.
        """
        values = widen(raw, dtype)
        _check_finite(values, tensor, "holds NaN or infinity: the checkpoint is damaged")
        if tensor.form is not None:
            importance = self.importance.get(tensor.output.path)
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
            packed = self.arranged.source.read_packed(name)
            parts = [packed.weight, packed.scales]
            if packed.biases is not None:
                parts = [packed.weight, *_rounded_scales(packed.scales, packed.biases, tensor)]
            target.take([as_numpy(part) for part in parts], ErrorStats())
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


def _rounded_scales(scales: mx.array, biases: mx.array, tensor: PlannedTensor) -> list[mx.array]:
    """Scales and biases of copied codes in the dtype of the plan.

    Raises:
        CheckpointError: that dtype does not hold them: they overflow, or are too small for it.
    """
    largest = mx.abs(scales).max()
    rounded = []
    for part in (scales, biases):
        found = part.astype(mx_dtype(tensor.dtype))
        lost = mx.abs(found.astype(mx.float32) - part.astype(mx.float32))
        allowed = mx.maximum(mx.abs(part) * SCALE_LOSS, largest * SCALE_LOSS / 16)
        if not mx.all(lost <= allowed).item():
            raise CheckpointError(
                f"{tensor.output.name} has scales that {tensor.dtype} does not hold; quantise it "
                f"anew with --set {tensor.output.path}={tensor.format}."
            )
        rounded.append(found)
    return rounded


def _check_fits(values: Floats, tensor: PlannedTensor) -> None:
    _check_finite(values, tensor, f"is too large for {tensor.dtype}: choose bfloat16")


def _check_finite(values: Floats, tensor: PlannedTensor, what: str) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{tensor.output.name} {what}.")


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One tensor, as it was handed to the disk."""

    error: ErrorStats
    checksums: list[int]  # CRC-32 of each of its arrays
    nearest: int = 0  # experts that were rounded without error feedback, for want of tokens


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


SCALE_LOSS = 2.0**-8  # relative: what bfloat16 would lose of the scale of copied codes
CHECKPOINT_BYTES = 128 << 20  # written between two lines of the journal
CHECKPOINT_S = 5.0


@dataclass(slots=True)
class WriteProgress:
    """Counts weights written, and reports them."""

    progress: Progress
    total: int
    done: int

    def add(self, count: int) -> None:
        """`count` more."""
        self.done += count
        self.progress("write", self.done, self.total)


def write_shard(
    path: Path, tensors: list[PlannedTensor], writer: TensorWriter, journal: Journal
) -> None:
    """All tensors of one file that the journal does not have; then the file has its name."""
    arrays = [array for tensor in tensors for array in tensor.arrays]
    with ShardFile(path, arrays) as file:
        with checkpoints(file, journal) as record:
            for tensor in tensors:
                if tensor.output.name not in journal.tensors:
                    record(tensor, writer.write(tensor, file))
        file.finish()


@contextmanager
def checkpoints(
    file: ShardFile, journal: Journal
) -> Iterator[Callable[[PlannedTensor, WrittenTensor], None]]:
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

    def record(tensor: PlannedTensor, written: WrittenTensor) -> None:
        nonlocal size
        pending[tensor.output.name] = asdict(written)
        size += tensor.num_bytes
        if size >= CHECKPOINT_BYTES or time.monotonic() - started >= CHECKPOINT_S:
            settle()

    yield record
    settle()


def written_entries(tensors: list[PlannedTensor], journal: Journal) -> list[dict[str, Any]]:
    """For the report, as writing found them."""
    written = ((tensor, *_journalled(journal, tensor)) for tensor in tensors)
    return [as_written(*entry).as_dict() for entry in written]


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
        entries.append(checked.as_dict())
        progress(f"check {path.name}", number, len(tensors))
    return entries


def _journalled(journal: Journal, tensor: PlannedTensor) -> tuple[ErrorStats, list[int]]:
    try:
        entry = journal.tensors[tensor.output.name]
        return ErrorStats(**entry["error"]), entry["checksums"]
    except (KeyError, TypeError) as error:
        raise damaged(journal.path) from error
