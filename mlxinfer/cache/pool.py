"""The K and V arrays of one layer: sealed pages and tails. Knows slots and rows; no sequences.

H = KV heads, D = head_dim, P = page_size, N = tokens.

`keys` and `values` are (H, num_pages * P, D): heads first, so that a run of pages is a view that
attention takes as it is. They are updated in place, which MLX does only while nobody else holds the
buffer: write them behind a barrier, and never keep a view in a variable across steps.

`tail_keys` and `tail_values` are (num_slots, H, 2 * P, D), a ring of two pages per running
sequence: position p lies at p % (2 * P). A decode step writes tails only; while an earlier step is
in flight that copies them, which is kilobytes a sequence where the pool would be gigabytes.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..core import KVSpec


class LayerPool:
    """Pages and tails of one attention layer, in the activation dtype."""

    def __init__(
        self, spec: KVSpec, *, page_size: int, num_pages: int, num_slots: int, dtype: mx.Dtype
    ) -> None:
        self.spec = spec
        self.page_size = page_size
        self.dtype = dtype
        self.num_pages = num_pages
        self.num_slots = num_slots
        heads, tokens = spec.num_kv_heads, num_pages * page_size
        self.keys = mx.zeros((heads, tokens, spec.key_dim), dtype)
        self.values = mx.zeros((heads, tokens, spec.value_dim), dtype)
        self.tail_keys = mx.zeros((num_slots, heads, 2 * page_size, spec.key_dim), dtype)
        self.tail_values = mx.zeros((num_slots, heads, 2 * page_size, spec.value_dim), dtype)

    def arrays(self) -> list[mx.array]:
        """Everything held, for evaluation and accounting."""
        return [self.keys, self.values, self.tail_keys, self.tail_values]

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails: what a step copies while another is in flight."""
        return self.tail_keys.nbytes + self.tail_values.nbytes

    def write_pages(
        self, runs: Sequence[tuple[int, int]], row: int, keys: mx.array, values: mx.array
    ) -> None:
        """Store rows `row`, `row + 1`, ... of keys and values (T, H, D) in the slots of `runs`."""
        for start, stop in runs:
            end = row + stop - start
            self.keys[:, start:stop] = keys[row:end].swapaxes(0, 1)  # (H, N, D)
            self.values[:, start:stop] = values[row:end].swapaxes(0, 1)
            row = end

    def write_tails(
        self, slots: mx.array, offsets: mx.array, keys: mx.array, values: mx.array
    ) -> None:
        """Store keys and values (N, H, D) at `offsets` (N,) of the tails of `slots` (N,)."""
        self.tail_keys[slots, :, offsets] = keys
        self.tail_values[slots, :, offsets] = values

    def seal(self, slots: mx.array, offsets: mx.array, pool_slots: mx.array) -> None:
        """Copy tail tokens (`slots`, `offsets`) to `pool_slots`; all (N,)."""
        self.keys[:, pool_slots] = self.tail_keys[slots, :, offsets].swapaxes(0, 1)  # (H, N, D)
        self.values[:, pool_slots] = self.tail_values[slots, :, offsets].swapaxes(0, 1)

    def view(self, runs: Sequence[tuple[int, int]]) -> tuple[mx.array, mx.array]:
        """K and V (H, N, D) of the pool slots of `runs`: a view of one run, a copy of several."""
        if len(runs) == 1:
            start, stop = runs[0]
            return self.keys[:, start:stop], self.values[:, start:stop]
        return (
            mx.concatenate([self.keys[:, start:stop] for start, stop in runs], axis=1),
            mx.concatenate([self.values[:, start:stop] for start, stop in runs], axis=1),
        )

    def grow_pages(self, num_pages: int) -> None:
        """Make room for `num_pages`, one array at a time so that only one is ever there twice."""
        extra = (num_pages - self.num_pages) * self.page_size
        self.keys = _extended(self.keys, axis=1, extra=extra)
        mx.eval(self.keys)
        self.values = _extended(self.values, axis=1, extra=extra)
        mx.eval(self.values)
        self.num_pages = num_pages

    def grow_tails(self, num_slots: int) -> None:
        """Make room for `num_slots` running sequences."""
        extra = num_slots - self.num_slots
        self.tail_keys = _extended(self.tail_keys, axis=0, extra=extra)
        self.tail_values = _extended(self.tail_values, axis=0, extra=extra)
        mx.eval(self.tail_keys, self.tail_values)
        self.num_slots = num_slots


def page_bytes(spec: KVSpec, *, page_size: int, dtype: mx.Dtype) -> int:
    """Bytes of one page of one layer; a tail takes two of them."""
    return spec.num_kv_heads * (spec.key_dim + spec.value_dim) * page_size * dtype.size


def _extended(array: mx.array, *, axis: int, extra: int) -> mx.array:
    shape = list(array.shape)
    shape[axis] = extra
    return mx.concatenate([array, mx.zeros(shape, array.dtype)], axis=axis)
