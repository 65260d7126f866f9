"""Tensors of a plan into files: read, quantised and written a block of rows at a time.

One thread reads (MLX belongs to it); the others quantise with numpy and write. How much is held
follows from the size of a block and the number of threads, not from the size of a tensor.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .arrange import Arranged
from .arrays import as_numpy, dtype_name, mx_dtype
from .files import ShardFile
from .numbers import Floats, narrow, widen
from .plan import Planned
from .quantise import Error, Method, compare, quantise, total

MAX_WORKERS = 8
BYTES_PER_WEIGHT = 14  # of a block in flight: as read, in float32, codes, and what is written
MIN_BLOCK, MAX_BLOCK = 1 << 16, 1 << 21  # numbers
BASE_BYTES = 200 << 20  # Python, MLX and numpy, before anything is read
CACHED_BYTES = 32 << 20  # that MLX may keep of what was freed

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
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.budget.workers, "convert")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def write(self, tensor: Planned, file: ShardFile) -> Error:
        """Put one tensor into its file; what rounding cost."""
        if tensor.packed:
            return self._copy(tensor, file)
        blocks = self.arranged.blocks(tensor.output, self.budget.block)
        return total(self._spread(tensor, file, blocks))

    def _spread(
        self, tensor: Planned, file: ShardFile, blocks: Iterator[mx.array]
    ) -> Iterator[Error]:
        """Hand blocks to the threads, as many at once as there are threads; errors in order."""
        running: list[Future[Error]] = []
        try:
            row = 0
            for block in blocks:
                raw, count = as_numpy(block), block.shape[0]
                while len(running) >= self.budget.workers:
                    yield running.pop(0).result()
                dtype = dtype_name(block)
                running.append(self._pool.submit(self._block, tensor, file, row, raw, dtype))
                row += count
            while running:
                yield running.pop(0).result()
        finally:
            for job in running:
                job.cancel()

    def _block(
        self, tensor: Planned, file: ShardFile, row: int, raw: NDArray[np.generic], dtype: str
    ) -> Error:
        values = widen(raw, dtype)
        if tensor.form is None:
            error = self._dense(tensor, file, row, raw, dtype, values)
        else:
            importance = self.importance.get(tensor.output.path)
            method = Method(tensor.form, tensor.dtype, self.searched, importance)
            rows, error = quantise(values, method)
            parts = [rows.weight, rows.scales, rows.biases]
            for array, part in zip(tensor.arrays, parts, strict=False):
                assert part is not None
                file.write(array.name, row * part.shape[1] * part.itemsize, part)
        self.wrote(raw.size)
        return error

    def _dense(
        self,
        tensor: Planned,
        file: ShardFile,
        row: int,
        raw: NDArray[np.generic],
        dtype: str,
        values: Floats,
    ) -> Error:
        name = tensor.output.name
        if dtype == tensor.dtype:
            file.write(name, row * raw.shape[1] * raw.itemsize, raw)
            return Error(energy=float(np.einsum("rk,rk->", values, values)))
        narrowed = narrow(values, tensor.dtype)
        file.write(name, row * narrowed.shape[1] * narrowed.itemsize, narrowed)
        return compare(widen(narrowed, tensor.dtype), values)

    def _copy(self, tensor: Planned, file: ShardFile) -> Error:
        """The source's own codes; scales are rounded where float32 alone holds them."""
        offsets = [0, 0, 0]
        for name in tensor.output.sources:
            packed = self.arranged.source.read_packed(name)
            scales, biases = packed.scales, packed.biases
            if biases is not None:
                scales, biases = (a.astype(mx_dtype(tensor.dtype)) for a in (scales, biases))
            for index, (array, part) in enumerate(
                zip(tensor.arrays, (packed.weight, scales, biases), strict=False)
            ):
                assert part is not None
                offsets[index] += file.write(array.name, offsets[index], as_numpy(part))
            self.wrote(tensor.output.num_weights // len(tensor.output.sources))
        return Error()


@contextmanager
def little_cached() -> Iterator[None]:
    """Let MLX keep hardly anything of what was freed: blocks of all sizes come and go."""
    before = mx.set_cache_limit(CACHED_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
