"""The K and V arrays of one layer: sealed pages and tails. Knows slots and rows; no sequences.

H = KV heads, W = width of a stored part, P = page_size, N = tokens.

Pages are (H, num_pages * P, W): heads first, so that a run of pages is a view that attention takes
as it is. They are updated in place, which MLX does only while nobody else holds the buffer: write
them behind a barrier, and never keep a view in a variable across steps.

Tails are (num_slots, H, 2 * P, W), a ring of two pages per running sequence: position p lies at
p % (2 * P). A decode step writes tails only; while an earlier step is in flight that copies them,
which is kilobytes a sequence where the pool would be gigabytes.
"""

from bisect import bisect_right
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import KVSpec
from .formats import KVFormat, make_format, rotatable, vector_bytes

PIECE = 2048  # tokens that are decoded together

Runs = Sequence[tuple[int, int]]  # [from, to) ranges of pool slots
Bits = tuple[int | None, int | None]  # of keys and values; None: the activation dtype
PLAIN: Bits = (None, None)

TailPlace = tuple[mx.array | slice, slice, mx.array | slice]  # index of N tokens in tails


def tail_place(slots: NDArray[np.int32], offsets: NDArray[np.int32]) -> TailPlace:
    """Where tokens go whose tails are `slots` (N,), at `offsets` (N,); one alone as slices.

    Slices cost the host a third of what index arrays cost.
    """
    if len(slots) > 1:
        return mx.array(slots), slice(None), mx.array(offsets)
    slot, offset = int(slots[0]), int(offsets[0])
    return slice(slot, slot + 1), slice(None), slice(offset, offset + 1)


class Plane:
    """The keys or the values of one layer, in one format: one array for each part of it."""

    __slots__ = ("fmt", "pages", "tails")

    def __init__(
        self, fmt: KVFormat, heads: int, *, page_size: int, num_pages: int, num_slots: int
    ) -> None:
        self.fmt = fmt
        tokens, ring = num_pages * page_size, 2 * page_size
        self.pages = [mx.zeros((heads, tokens, width), dtype) for width, dtype in fmt.parts]
        self.tails = [
            mx.zeros((num_slots, heads, ring, width), dtype) for width, dtype in fmt.parts
        ]

    def write_pages(self, runs: Runs, row: int, parts: list[mx.array]) -> None:
        """Store rows `row`, `row + 1`, ... of encoded parts (T, H, W) in the slots of `runs`."""
        for start, stop in runs:
            end = row + stop - start
            for pages, part in zip(self.pages, parts, strict=True):
                pages[:, start:stop] = part[row:end].swapaxes(0, 1)  # (H, N, W)
            row = end

    def write_tails(self, place: TailPlace, parts: list[mx.array]) -> None:
        """Store encoded parts (N, H, W) in tails."""
        for tails, part in zip(self.tails, parts, strict=True):
            tails[place] = part if len(part) > 1 else mx.expand_dims(part, 2)

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array) -> None:
        """Copy tail tokens (`slots`, `offsets`) to the pool slots `targets`; all (N,)."""
        for pages, tails in zip(self.pages, self.tails, strict=True):
            pages[:, targets] = tails[slots, :, offsets].swapaxes(0, 1)  # (H, N, W)

    def peek(self, start: int, stop: int) -> list[mx.array]:
        """The stored parts (H, N, W) of one run of pages, as copies of their own."""
        return [mx.contiguous(pages[:, start:stop]) for pages in self.pages]

    def paste(self, parts: list[mx.array], start: int, slot: int, offset: int) -> None:
        """Store parts (H, N, W) in the pages from pool slot `start` on, and in a tail."""
        for pages, tails, part in zip(self.pages, self.tails, parts, strict=True):
            count = part.shape[1]
            pages[:, start : start + count] = part
            tails[slot, :, offset : offset + count] = part

    def _decoded(self, parts: list[mx.array], after: mx.array | None = None) -> mx.array:
        """(H, N, D), a piece after the other: decoding takes several times what it gives."""
        count = parts[0].shape[1]
        if self.fmt.as_stored or (count <= PIECE and after is None):
            return self.fmt.decode(parts)
        pieces = []
        for start in range(0, count, PIECE):
            piece = [part[:, start : start + PIECE] for part in parts]
            after = self.fmt.decode(piece if after is None else mx.depends(piece, [after]))
            pieces.append(after)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def read_each(
        self,
        runs: Sequence[Runs],
        covers: Runs,
        after: mx.array | None = None,
        *,
        transposed: bool = False,
    ) -> list[list[mx.array]]:
        """(H, N, D) of every run of several sequences, or (H, D, N).

        Args:
            runs: of each sequence.
            covers: ranges that hold all of them: each is decoded once, and runs are views of it.
            after: where there is more than one range, none is decoded before this is there.
            transposed: once for all, which is cheaper than for each run.
        """
        if self.fmt.as_stored:
            begins, sources = [0], self.pages
        else:
            begins, sources = [begin for begin, _ in covers], self._read_covers(covers, after)
        before: tuple[slice, ...] = (slice(None),)
        if transposed:
            sources = [source.swapaxes(1, 2) for source in sources]
            before = slice(None), slice(None)
        found: list[list[mx.array]] = []
        for some in runs:
            views = []
            for start, stop in some:
                place = bisect_right(begins, start) - 1
                view = slice(start - begins[place], stop - begins[place])
                views.append(sources[place][*before, view])
            found.append(views)
        return found

    def _read_covers(self, covers: Runs, after: mx.array | None) -> list[mx.array]:
        decoded: list[mx.array] = []
        for cover in covers:
            decoded.append(self.read_runs([cover], after))
            after = decoded[-1] if len(covers) > 1 else None  # one is on its way at a time
        return decoded

    def read_runs(self, runs: Runs, after: mx.array | None = None) -> mx.array:
        """(H, N, D) of several runs, one after the other, decoded not before `after` is there."""
        if len(runs) == 1:
            start, stop = runs[0]
            return self._decoded([pages[:, start:stop] for pages in self.pages], after)
        joined = [
            mx.concatenate([pages[:, start:stop] for start, stop in runs], axis=1)
            for pages in self.pages
        ]
        return self._decoded(joined, after)

    def read_pages(self, ids: mx.array, page_size: int) -> mx.array:
        """(H, B, n * P, D) of pages `ids` (B, n), gathered."""
        parts = [mx.unflatten(pages, 1, (-1, page_size))[:, ids] for pages in self.pages]
        return mx.flatten(self.fmt.decode(parts), 2, 3)  # from (H, B, n, P, D)

    def read_tails(self, slots: mx.array | slice) -> mx.array:
        """(B, H, 2 * P, D)."""
        return self.fmt.decode([tails[slots] for tails in self.tails])

    def grow_pages(self, extra_tokens: int) -> None:
        """Make room, one array at a time so that only one is ever there twice."""
        for i, pages in enumerate(self.pages):
            self.pages[i] = _extended(pages, axis=1, extra=extra_tokens)
            del pages
            mx.eval(self.pages[i])

    def grow_tails(self, extra_slots: int) -> None:
        """Make room for more running sequences."""
        self.tails = [_extended(tails, axis=0, extra=extra_slots) for tails in self.tails]
        mx.eval(self.tails)


class LayerPool:
    """Pages and tails of one attention layer.

    Keys of 4 bits are rotated by a Hadamard matrix before they are stored, and queries with them:
    scores stay the same, and outliers of single channels are spread over all.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        page_size: int,
        num_pages: int,
        num_slots: int,
        dtype: mx.Dtype,
        bits: Bits = PLAIN,
    ) -> None:
        key_format, value_format = layer_formats(spec, dtype, bits)
        heads = spec.num_kv_heads
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.form = (heads, spec.key_dim, spec.value_dim, bits)  # the same: kernels see no other
        self._rotates = bits[0] == 4
        self.keys, self.values = (
            Plane(fmt, heads, page_size=page_size, num_pages=num_pages, num_slots=num_slots)
            for fmt in (key_format, value_format)
        )

    def arrays(self) -> list[mx.array]:
        """Everything held, for evaluation and accounting."""
        return [
            array for plane in (self.keys, self.values) for array in (*plane.pages, *plane.tails)
        ]

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails: what a step copies while another is in flight."""
        return sum(t.nbytes for plane in (self.keys, self.values) for t in plane.tails)

    def rotate(self, queries: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Queries and keys (..., D) in the basis that keys are stored in."""
        if not self._rotates:
            return queries, keys
        return mx.hadamard_transform(queries), mx.hadamard_transform(keys)

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array) -> None:
        """Copy tail tokens (`slots`, `offsets`) to the pool slots `targets`; all (N,)."""
        self.keys.seal(slots, offsets, targets)
        self.values.seal(slots, offsets, targets)

    def grow_pages(self, num_pages: int) -> None:
        """Make room for `num_pages`."""
        extra = (num_pages - self.num_pages) * self.page_size
        for plane in (self.keys, self.values):
            plane.grow_pages(extra)
        self.num_pages = num_pages

    def grow_tails(self, num_slots: int) -> None:
        """Make room for `num_slots` running sequences."""
        for plane in (self.keys, self.values):
            plane.grow_tails(num_slots - self.num_slots)
        self.num_slots = num_slots


def layer_formats(spec: KVSpec, dtype: mx.Dtype, bits: Bits) -> tuple[KVFormat, KVFormat]:
    """How a layer stores its keys and values."""
    assert bits[0] != 4 or rotatable(spec.key_dim), "refused before a cache is built"
    return make_format(spec.key_dim, dtype, bits[0]), make_format(spec.value_dim, dtype, bits[1])


def token_bytes(spec: KVSpec, dtype: mx.Dtype, bits: Bits) -> int:
    """Bytes that one layer keeps of one token."""
    return spec.num_kv_heads * sum(vector_bytes(f) for f in layer_formats(spec, dtype, bits))


def _extended(array: mx.array, *, axis: int, extra: int) -> mx.array:
    """With zeros behind it; padding writes the new array alone, where joining makes them first."""
    return mx.pad(array, [(0, extra if i == axis else 0) for i in range(array.ndim)])
