"""Pages and tails as arrays: vectors of one kind of one layer. Knows slots; no sequences.

H = KV heads, W = width of a stored part, P = page_size, N = tokens.

A tail is a ring of two pages per running sequence, (H, 2 * P, W): position p lies at p % (2 * P).
A decode step writes tails only; while an earlier step is in flight that copies them, which is
kilobytes a sequence where the pages would be gigabytes. Where keys and values are stored alike they
share tails, (2 * H, 2 * P, W), keys first: one write a step serves both. All tails of a part are
one array of vectors, (num_slots * H * 2 * P, W).
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..metal_kernels.stored import KVFormat
from .inputs import Ints, StepMetadata

MIN_NUMBERS = 8  # MLX passes shorter arrays in another way, as another variant of a kernel
PIECE = 2048  # tokens that are decoded together

Runs = Sequence[tuple[int, int]]  # [from, to) ranges of page slots
Tails = list[mx.array]  # each part (num_slots * heads * 2 * P, W)
Stored = list[list[mx.array]]  # parts (T, H, W) of keys and of values, or (T, 2 * H, W) of both


@dataclass(frozen=True, slots=True)
class TailPlace:
    """Where tokens of a step go in tails, the same for all layers: N of T tokens.

    Attributes:
        rows: (N,) their rows in the flat list; None: all, in order.
        slots, offsets: (N,) the tail of each, and its place in it.
        ring: tokens of a tail.
        is_decode: the step has one token of each of some sequences, and no others.
        positions: (max(T, 8),) by which all tokens are turned, zeros at the end. None: no layer
            writes by positions, or they are not whole numbers of one axis.
    """

    rows: mx.array | None
    slots: Ints
    offsets: Ints
    ring: int
    is_decode: bool = False
    positions: mx.array | None = None
    _rows: dict[int, mx.array] = field(default_factory=dict)  # by number of heads
    _marks: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)  # by that of slots

    @staticmethod
    def of(metadata: StepMetadata, page_size: int, *, by_position: bool) -> "TailPlace":
        """Read where the tokens of a step go; `by_position`: a layer writes by positions."""
        rows, slots, positions = _tail_tokens(metadata, page_size)
        is_decode = not metadata.long and max([s.width for s in metadata.short], default=1) == 1
        turning = metadata.turning
        return TailPlace(
            rows=None if len(rows) == len(metadata.positions) else mx.array(rows),
            slots=slots,
            offsets=positions % (2 * page_size),
            ring=2 * page_size,
            is_decode=is_decode,
            positions=padded(turning) if by_position and turning.ndim == 1 else None,
        )

    def rows_of(self, heads: int) -> mx.array:
        """(N * heads, 1): every vector of the tokens among those of all tails of so many heads.

        One index for a vector costs the host a third of what one for each axis costs.
        """
        if heads not in self._rows:
            first = self.slots * np.int32(heads * self.ring) + self.offsets  # (N,) of head 0
            steps = np.arange(0, heads * self.ring, self.ring, dtype=np.int32)
            self._rows[heads] = mx.array((first[:, None] + steps).reshape(-1, 1))
        return self._rows[heads]

    def marks(self, num_slots: int) -> tuple[mx.array, mx.array]:
        """slot * ring + offset of each token, (N,) or 8; and (num_slots, ring) int32, 1 there."""
        if num_slots not in self._marks:
            found = self.slots * np.int32(self.ring) + self.offsets
            taken = np.zeros((num_slots, self.ring), np.int32)
            taken.ravel()[found] = 1
            self._marks[num_slots] = padded(found), mx.array(taken)
        return self._marks[num_slots]


def padded(numbers: Ints) -> mx.array:
    """(N,) -> (max(N, 8),), zeros at the end."""
    if len(numbers) >= MIN_NUMBERS:
        return mx.array(numbers)
    longer = np.zeros(MIN_NUMBERS, np.int32)
    longer[: len(numbers)] = numbers
    return mx.array(longer)


def _tail_tokens(metadata: StepMetadata, page_size: int) -> tuple[Ints, Ints, Ints]:
    """Flat rows, slots and positions (N,) of the tokens that go to tails.

    Of a prefill chunk these are the tokens of its last, not yet full page.
    """
    if len(metadata.short) == 1 and not metadata.long:
        return metadata.short[0].tokens()
    parts = [segments.tokens() for segments in metadata.short]
    for s in metadata.long:
        rest = min(s.stop % page_size, s.num_tokens)  # what came before is in the tail already
        step = np.arange(-rest, 0, dtype=np.int32)
        parts.append((s.row + s.num_tokens + step, np.full_like(step, s.slot), s.stop + step))
    rows, slots, positions = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(slots), np.concatenate(positions)


class Plane:
    """Vectors of one kind in one format, such as the keys of a layer: an array for each part.

    Args:
        fmt, dim: of the stored vectors.
        dtype: of decoded vectors.
        num_tokens: of all pages.
        tails: of the plane, or of keys and values together.
        tail_shape: heads and tokens of one tail.
        own: the plane's heads among those of the tails.

    Attributes:
        first, dim: the numbers of a vector that are read: all, or those of a `cut`.
    """

    __slots__ = (
        *("_tail_shape", "dim", "dtype", "first", "fmt", "own", "pages", "tail_head"),
        *("tail_heads", "tails", "vector_dim"),
    )

    def __init__(
        self,
        fmt: KVFormat,
        dim: int,
        dtype: mx.Dtype,
        *,
        num_tokens: int,
        tails: Tails,
        tail_shape: tuple[int, int],
        own: slice,
    ) -> None:
        self.fmt, self.dtype = fmt, dtype
        self.first, self.dim, self.vector_dim = 0, dim, dim
        self.tails = tails
        self.tail_heads, self.tail_head = tail_shape[0], int(own.start)
        self.own = own
        self._tail_shape = tail_shape
        heads = own.stop - self.tail_head
        self.pages = [
            mx.zeros((heads, num_tokens, width), kind) for width, kind in fmt.parts(dim, dtype)
        ]

    def cut(self, first: int, dim: int) -> "Plane":
        """The same arrays, of which `dim` numbers of a vector are read, from `first` on."""
        part = copy(self)
        part.first, part.dim = first, dim
        return part

    def decode(self, parts: list[mx.array]) -> mx.array:
        """Parts (..., W) -> the numbers that are read of each vector, (..., dim)."""
        vectors = self.fmt.decode(parts, self.dtype) if self.fmt.bits else parts[0]
        if self.dim == self.vector_dim:
            return vectors
        return vectors[..., self.first : self.first + self.dim]

    def own_tails(self) -> list[mx.array]:
        """Views (num_slots, H, 2 * P, W) of each part; not to be kept."""
        return [mx.unflatten(part, 0, (-1, *self._tail_shape))[:, self.own] for part in self.tails]

    def write_pages(self, runs: Runs, row: int, parts: list[mx.array]) -> None:
        """Store rows `row`, `row + 1`, ... of encoded parts (T, H, W) in the slots of `runs`."""
        for start, stop in runs:
            end = row + stop - start
            for pages, part in zip(self.pages, parts, strict=True):
                pages[:, start:stop] = part[row:end].swapaxes(0, 1)  # (H, N, W)
            row = end

    def copy_out(self, start: int, stop: int) -> list[mx.array]:
        """The stored parts (H, N, W) of one run of pages, as copies of their own."""
        return [mx.contiguous(pages[:, start:stop]) for pages in self.pages]

    def copy_in(self, parts: list[mx.array], start: int, slot: int, offset: int) -> None:
        """Store parts (H, N, W) in the pages from page slot `start` on, and in a tail."""
        for i, (pages, part) in enumerate(zip(self.pages, parts, strict=True)):
            count = part.shape[1]
            pages[:, start : start + count] = part
            tails = mx.unflatten(self.tails[i], 0, (-1, *self._tail_shape))
            assert slot < len(tails), "MLX would write nowhere, and say nothing"
            tails[slot, self.own, offset : offset + count] = part
            self.tails[i] = tails.flatten(0, 2)

    def read_runs(self, runs: Runs, after: mx.array | None = None) -> mx.array:
        """(H, N, D) of several runs, one after the other, decoded not before `after` is there."""
        if len(runs) == 1:
            start, stop = runs[0]
            return self._decoded([pages[:, start:stop] for pages in self.pages], after)
        sources = self.pages if after is None else mx.depends(self.pages, [after])
        joined = [
            mx.concatenate([pages[:, start:stop] for start, stop in runs], axis=1)
            for pages in sources
        ]
        return self._decoded(joined, after)

    def _decoded(self, parts: list[mx.array], after: mx.array | None = None) -> mx.array:
        """(H, N, D), a piece after the other: decoding takes several times what it gives."""
        count = parts[0].shape[1]
        if not self.fmt.bits or (count <= PIECE and after is None):
            return self.decode(parts)
        pieces = []
        for start in range(0, count, PIECE):
            piece = [part[:, start : start + PIECE] for part in parts]
            after = self.decode(piece if after is None else mx.depends(piece, [after]))
            pieces.append(after)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def read_pages(self, ids: mx.array, page_size: int) -> mx.array:
        """(H, B, n * P, D) of pages `ids` (B, n), gathered."""
        # mx.take builds a shorter graph, and takes the CPU nine times as long to evaluate.
        parts = [mx.unflatten(pages, 1, (-1, page_size))[:, ids] for pages in self.pages]
        return mx.flatten(self.decode(parts), 2, 3)  # from (H, B, n, P, D)

    def grow_pages(self, extra_tokens: int) -> None:
        """Make room, one array at a time so that only one is ever there twice."""
        for i, pages in enumerate(self.pages):
            self.pages[i] = extended(pages, axis=1, extra=extra_tokens)
            del pages
            mx.eval(self.pages[i])


def extended(array: mx.array, *, axis: int, extra: int) -> mx.array:
    """The array with `extra` zeros at the end of an axis.

    Padding writes the new array alone, where a concatenation would make the zeros first.
    """
    return mx.pad(array, [(0, extra if i == axis else 0) for i in range(array.ndim)])


def vector_bytes(fmt: KVFormat, dim: int, dtype: mx.Dtype) -> int:
    """Bytes of one stored vector, scales and biases included."""
    return sum(width * kind.size for width, kind in fmt.parts(dim, dtype))
