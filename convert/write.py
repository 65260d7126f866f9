"""Tensors of a plan into files: read, quantised and written a block of rows at a time.

One thread reads (MLX belongs to it) and writes; the others quantise with numpy. How much is held
follows from the size of a block and the number of threads, not from the size of a tensor.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .arrange import Arranged
from .arrays import as_numpy, dtype_name, mx_dtype
from .files import ShardFile
from .numbers import Floats, narrow, widen
from .plan import Planned
from .quantise import Error, Method, compare, quantise, squares_of

MAX_WORKERS = 8
BYTES_PER_WEIGHT = 14  # of a block in flight: as read, in float32, codes, and what is written
MIN_BLOCK, MAX_BLOCK = 1 << 16, 1 << 20  # numbers
BASE_BYTES = 100 << 20  # Python, MLX and numpy, before anything is read
CACHED_BYTES = 32 << 20  # that MLX may keep of what was freed

Arrays = list[NDArray[Any]]
Wrote = Callable[[int], None]  # told how many numbers of the source are done


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory as a size of blocks and a number of them in flight."""

    block: int  # numbers
    workers: int

    @classmethod
    def of(cls, max_bytes: int | None) -> "Budget":
        """As large as `max_bytes` allows, and no larger than is useful; None: that."""
        workers = min(os.cpu_count() or 1, MAX_WORKERS)
        if max_bytes is None:
            return cls(MAX_BLOCK, workers)
        room = max(0, max_bytes - BASE_BYTES - CACHED_BYTES)
        workers = max(1, min(workers, room // (MIN_BLOCK * BYTES_PER_WEIGHT) - 1))
        block = room // (BYTES_PER_WEIGHT * (workers + 1))
        return cls(min(max(block, MIN_BLOCK), MAX_BLOCK), workers)

    @property
    def peak_bytes(self) -> int:
        """What a conversion holds at most, if no row or expert is larger than a block."""
        in_flight = self.block * BYTES_PER_WEIGHT * (self.workers + 1)
        return BASE_BYTES + CACHED_BYTES + in_flight


@dataclass(slots=True)
class TensorWriter:
    """Writes tensors, one after the other; `close` it."""

    arranged: Arranged
    budget: Budget
    searched: bool
    importance: Mapping[str, Floats]  # by path: (in_dims,), mean 1
    wrote: Wrote = lambda _: None
    sampled: bool = False  # errors of a part of the rows stand for all: nobody compares them
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.budget.workers, "convert")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def write(self, tensor: Planned, file: ShardFile) -> "Written":
        """Put one tensor into its file."""
        target = _Target(tensor, file)
        if tensor.packed:
            self._copy(tensor, target)
        else:
            self._spread(tensor, target)
        return Written(target.error, target.checksums)

    def _spread(self, tensor: Planned, target: "_Target") -> None:
        """Hand blocks to the threads, as many at once as there are; write what comes, in order."""
        running: deque[Future[tuple[Arrays, Error]]] = deque()
        try:
            for block in self.arranged.blocks(tensor.output, self.budget.block):
                if len(running) >= self.budget.workers:
                    self.wrote(target.take(*running.popleft().result()))
                raw = as_numpy(block)
                running.append(self._pool.submit(self._block, tensor, raw, dtype_name(block)))
            while running:
                self.wrote(target.take(*running.popleft().result()))
        finally:
            for job in running:
                job.cancel()

    def _block(self, tensor: Planned, raw: NDArray[np.generic], dtype: str) -> tuple[Arrays, Error]:
        """What a block (R, in_dims) becomes. Runs in the threads."""
        values = widen(raw, dtype)
        _check_finite(values, tensor, "holds NaN or infinity: the checkpoint is damaged")
        if tensor.form is not None:
            importance = self.importance.get(tensor.output.path)
            method = Method(tensor.form, tensor.dtype, self.searched, importance, self.sampled)
            return _quantised(values, tensor, method)
        if dtype == tensor.dtype:
            return [raw], Error(energy=squares_of(values))
        with np.errstate(over="ignore"):
            narrowed = narrow(values, tensor.dtype)
        found = widen(narrowed, tensor.dtype)
        _check_fits(found, tensor)
        return [narrowed], compare(found, values)

    def _copy(self, tensor: Planned, target: "_Target") -> None:
        """The source's own codes; scales are rounded where float32 alone holds them."""
        for name in tensor.output.sources:
            packed = self.arranged.source.read_packed(name)
            parts = [packed.weight, packed.scales]
            if packed.biases is not None:
                rounded = (a.astype(mx_dtype(tensor.dtype)) for a in (packed.scales, packed.biases))
                parts = [packed.weight, *rounded]
                for part in parts[1:]:
                    _check_fits(widen(as_numpy(part), tensor.dtype), tensor)
            target.take([as_numpy(part) for part in parts], Error())
            self.wrote(tensor.output.num_weights // len(tensor.output.sources))


def _quantised(values: Floats, tensor: Planned, method: Method) -> tuple[Arrays, Error]:
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at below
        rows, error = quantise(values, method)
    if rows.biases is None:
        return [rows.weight, rows.scales], error
    for part in (rows.scales, rows.biases):
        _check_fits(widen(part, tensor.dtype), tensor)
    return [rows.weight, rows.scales, rows.biases], error


def _check_fits(values: Floats, tensor: Planned) -> None:
    _check_finite(values, tensor, f"is too large for {tensor.dtype}: choose bfloat16")


def _check_finite(values: Floats, tensor: Planned, what: str) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{tensor.output.name} {what}.")


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor, as it was handed to the disk."""

    error: Error
    checksums: list[int]  # CRC-32 of each of its arrays


class _Target:
    """The arrays of one tensor, each growing in its place in the file."""

    def __init__(self, tensor: Planned, file: ShardFile) -> None:
        self.error = Error()
        self.checksums = [0] * len(tensor.arrays)
        self._offsets = [0] * len(tensor.arrays)
        self._names = [array.name for array in tensor.arrays]
        self._file = file
        self._weights = tensor.output.num_weights
        self._bytes = tensor.arrays[0].num_bytes

    def take(self, arrays: Arrays, error: Error) -> int:
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
