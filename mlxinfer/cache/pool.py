"""Keys and values of one layer: their planes of pages, and tails. Knows slots; no sequences.

H = KV heads, W = width of a stored part, P = page_size, N = tokens.

A tail is a ring of two pages per running sequence, (H, 2 * P, W): position p lies at p % (2 * P).
A decode step writes tails only; while an earlier step is in flight that copies them, which is
kilobytes a sequence where the pool would be gigabytes. Where keys and values are stored alike they
share tails, (2 * H, 2 * P, W), keys first: one write a step serves both. All tails of a part are
one array of vectors, (num_slots * H * 2 * P, W).
"""

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..core import KVSpec
from ..metal_kernels.stored import share_tails
from .formats import (
    PLAIN,
    Bits,
    Cut,
    KeyBias,
    KVFormat,
    LessBias,
    layer_formats,
    make_format,
    stored_less_bias,
)
from .inputs import Ints

MIN_PLACES = 8  # MLX passes shorter arrays in another way
PIECE = 2048  # tokens that are decoded together

Runs = Sequence[tuple[int, int]]  # [from, to) ranges of pool slots
Tails = list[mx.array]  # each part (num_slots * heads * 2 * P, W)


@dataclass(frozen=True, slots=True)
class TailPlace:
    """Where N tokens go: each to an offset in the tail of a slot."""

    slots: Ints  # (N,)
    offsets: Ints  # (N,)
    ring: int  # tokens of a tail
    _rows: dict[int, mx.array] = field(default_factory=dict)  # by number of heads
    _marks: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)  # by that of slots

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
            places = np.zeros(max(len(found), MIN_PLACES), np.int32)
            places[: len(found)] = found
            taken = np.zeros((num_slots, self.ring), np.int32)
            taken.ravel()[found] = 1
            self._marks[num_slots] = mx.array(places), mx.array(taken)
        return self._marks[num_slots]


class Plane:
    """The keys or the values of one layer, in one format: one array for each part of it.

    Args:
        fmt: how vectors are stored.
        tails: of the plane, or of keys and values together.
        tail_shape: heads and tokens of one tail.
        own: its heads among those of the tails.
    """

    __slots__ = (
        *("_tail_shape", "first", "fmt", "own", "pages", "tail_head", "tail_heads", "tails"),
        "vector_dim",
    )

    def __init__(
        self, fmt: KVFormat, num_tokens: int, tails: Tails, tail_shape: tuple[int, int], own: slice
    ) -> None:
        self.fmt = fmt
        self.first, self.vector_dim = 0, fmt.dim
        self.tails = tails
        self.tail_heads, self.tail_head = tail_shape[0], int(own.start)
        self.own = own
        self._tail_shape = tail_shape
        heads = own.stop - self.tail_head
        self.pages = [mx.zeros((heads, num_tokens, width), dtype) for width, dtype in fmt.parts]

    def cut(self, first: int, dim: int) -> "Plane":
        """The same arrays, of which `dim` numbers of a vector are read, from `first` on."""
        part = copy(self)
        part.fmt, part.first = Cut(self.fmt, first, dim), first
        return part

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
        """Store parts (H, N, W) in the pages from pool slot `start` on, and in a tail."""
        for i, (pages, part) in enumerate(zip(self.pages, parts, strict=True)):
            count = part.shape[1]
            pages[:, start : start + count] = part
            tails = mx.unflatten(self.tails[i], 0, (-1, *self._tail_shape))
            assert slot < len(tails), "MLX would write nowhere, and say nothing"
            tails[slot, self.own, offset : offset + count] = part
            self.tails[i] = tails.flatten(0, 2)

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

    def read_pages(self, ids: mx.array, page_size: int) -> mx.array:
        """(H, B, n * P, D) of pages `ids` (B, n), gathered."""
        # mx.take builds a shorter graph, and takes the CPU nine times as long to evaluate.
        parts = [mx.unflatten(pages, 1, (-1, page_size))[:, ids] for pages in self.pages]
        return mx.flatten(self.fmt.decode(parts), 2, 3)  # from (H, B, n, P, D)

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


Stored = list[list[mx.array]]  # parts (T, H, W) of keys and of values, or (T, 2 * H, W) of both


class PagePool:
    """Pages and tails of one layer that keeps vectors of each token, in one plane or two.

    Args:
        formats: of each plane.
        heads: of each plane.
        joined: two planes of one format share their tails.

    Attributes:
        form: what kernels are compiled for; layers of one form share them.
        keys, values: the planes as attention reads them.
    """

    form: Hashable
    keys: "Plane"
    values: "Plane"

    def __init__(
        self,
        formats: Sequence[KVFormat],
        *,
        heads: int,
        joined: bool,
        page_size: int,
        num_pages: int,
        num_slots: int,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        self._joined = joined
        self._as_stored = all(fmt.as_stored for fmt in formats)
        self._tail_heads = 2 * heads if joined else heads
        self._tail_rows = self._tail_heads * 2 * page_size  # of a slot
        self._tails = [
            [mx.zeros((num_slots * self._tail_rows, width), t) for width, t in fmt.parts]
            for fmt in (formats[:1] if joined else formats)
        ]
        self._tail_parts = [  # (list, its plane, place in it): one loop, once a layer and step
            (tails, which, i) for which, tails in enumerate(self._tails) for i in range(len(tails))
        ]
        shape = self._tail_heads, 2 * page_size
        self.planes = []
        for i, fmt in enumerate(formats):
            first = i * heads if joined else 0
            tails = self._tails[0 if joined else i]
            own = slice(first, first + heads)
            self.planes.append(Plane(fmt, num_pages * page_size, tails, shape, own))

    def arrays(self) -> list[mx.array]:
        """Everything held, for evaluation and accounting."""
        pages = [part for plane in self.planes for part in plane.pages]
        return [*pages, *[part for tails in self._tails for part in tails]]

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails: what a step copies while another is in flight."""
        return sum(part.nbytes for tails in self._tails for part in tails)

    def write_pages(self, runs: Runs, row: int, stored: Stored) -> None:
        """Store rows `row`, `row + 1`, ... in the slots of `runs`."""
        for plane, parts in zip(self.planes, self._apart(stored), strict=True):
            plane.write_pages(runs, row, parts)

    def _apart(self, stored: Stored) -> Stored:
        """Parts (T, H, W) of each plane."""
        if len(stored) == len(self.planes):
            return stored
        return [[part[:, plane.own] for part in stored[0]] for plane in self.planes]

    def write_tails(self, place: TailPlace, stored: Stored) -> None:
        """Store N tokens in tails."""
        if self._joined and len(stored) == 2:
            keys, values = stored
            stored = [[]]
            for pair in zip(keys, values, strict=True):
                stored[0].append(mx.concatenate([*pair], axis=1))
        rows = place.rows_of(self._tail_heads)
        for tails, which, i in self._tail_parts:
            tails[i] = mx.put_along_axis(tails[i], rows, stored[which][i].flatten(0, 1), 0)

    def tail_parts(self) -> list[mx.array]:
        """The parts of tails: of keys and values together, or of keys and then of values."""
        return [tails[i] for tails, _, i in self._tail_parts]

    def replace_tails(self, parts: Sequence[mx.array]) -> None:
        """Take other arrays for `tail_parts`."""
        for (tails, _, i), part in zip(self._tail_parts, parts, strict=True):
            tails[i] = part

    def clear_tails(self, slots: list[int]) -> None:
        """Zeros in the tails `slots` (N,), which have a new owner."""
        assert max(slots) < self.num_slots, "MLX checks no index"
        for tails, _, i in self._tail_parts:
            of_slots = mx.unflatten(tails[i], 0, (-1, self._tail_rows))
            of_slots[mx.array(slots)] = 0
            tails[i] = mx.flatten(of_slots, 0, 1)

    def read_tails(self, slots: mx.array | slice) -> tuple[mx.array, mx.array]:
        """Keys and values (B, H, 2 * P, D) of the tails `slots` (B,)."""
        shape = (-1, self._tail_heads, 2 * self.page_size)
        keys: list[mx.array] = []
        values: list[mx.array] = []
        for tails, which, i in self._tail_parts:
            part = mx.unflatten(tails[i], 0, shape)[slots]  # (B, H or 2 * H, 2 * P, W)
            if self._joined:
                part, own_values = mx.split(part, 2, axis=1)
                values.append(own_values)
            (values if which else keys).append(part)
        if self._as_stored:
            return keys[0], values[0]
        return self.keys.fmt.decode(keys), self.values.fmt.decode(values)

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array) -> None:
        """Copy tail tokens (`slots`, `offsets`) to the pool slots `targets`; all (N,)."""
        for plane in self.planes:
            taken = [tails[slots, :, offsets] for tails in plane.own_tails()]  # (N, H, W)
            for pages, part in zip(plane.pages, taken, strict=True):
                pages[:, targets] = part.swapaxes(0, 1)  # (H, N, W)

    def restored(self, outputs: mx.array) -> mx.array:
        """Outputs of attention over stored values (T, heads * V), in the basis of the values."""
        return outputs

    def grow_pages(self, num_pages: int) -> None:
        """Make room for `num_pages`."""
        extra = (num_pages - self.num_pages) * self.page_size
        for plane in self.planes:
            plane.grow_pages(extra)
        self.num_pages = num_pages

    def grow_tails(self, num_slots: int) -> None:
        """Make room for `num_slots` running sequences."""
        extra = (num_slots - self.num_slots) * self._tail_rows
        for tails in self._tails:
            # In place: planes hold the same lists.
            tails[:] = [extended(part, axis=0, extra=extra) for part in tails]
            mx.eval(tails)
        self.num_slots = num_slots


class LayerPool(PagePool):
    """Keys and values of one attention layer.

    Keys of 4 bits are rotated by a Hadamard matrix before they are stored, and queries with them:
    scores stay the same, and outliers of single channels are spread over all.

    Args:
        key_bias: of a layer with one in its spec.
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
        key_bias: KeyBias | None = None,
    ) -> None:
        formats: list[KVFormat] = [*layer_formats(spec, dtype, bits)]
        self._less_bias: LessBias | None = None
        if stored_less_bias(spec, bits):
            assert key_bias is not None, "the spec says that there is one"
            rest = make_format(spec.key_dim, mx.float32, bits[0])
            self._less_bias = LessBias(rest, dtype, spec.num_kv_heads, key_bias)
            formats[0] = self._less_bias
        super().__init__(
            formats,
            heads=spec.num_kv_heads,
            joined=not self._less_bias and share_tails((spec.key_dim, spec.value_dim), bits),
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
        )
        self.form = (spec.num_kv_heads, spec.key_dim, spec.value_dim, bits)
        self._rotates = bits[0] == 4
        self.keys, self.values = self.planes

    def encode(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        positions: mx.array | None = None,
    ) -> tuple[mx.array, Stored]:
        """What is stored of keys and values (T, H, D), and queries in the basis of stored keys.

        Args:
            queries, keys, values: as the layer makes them.
            positions: (T,) at least, of the tokens; None: nothing needs them.
        """
        if self._as_stored:
            return queries, [[keys], [values]]
        queries, keys = self.rotate(queries), self.rotate(keys)
        stored_values = self.values.fmt.encode(values)
        if self._less_bias is None:
            return queries, [self.keys.fmt.encode(keys), stored_values]
        assert positions is not None
        positions = positions[: keys.shape[0]]
        return queries, [self._less_bias.encode_at(keys, positions), stored_values]

    def rotate(self, heads: mx.array) -> mx.array:
        """Queries or keys (T, H, D) in the basis of stored keys."""
        return mx.hadamard_transform(heads) if self._rotates else heads
