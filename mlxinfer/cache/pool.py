"""Keys and values of one layer: their planes of pages, and tails. Knows slots; no sequences.

H = KV heads, W = width of a stored part, P = page_size, N = tokens.

A tail is a ring of two pages per running sequence, (H, 2 * P, W): position p lies at p % (2 * P).
A decode step writes tails only; while an earlier step is in flight that copies them, which is
kilobytes a sequence where the pool would be gigabytes. Where keys and values are stored alike they
share tails, (2 * H, 2 * P, W), keys first: one write a step serves both. All tails of a part are
one array of vectors, (num_slots * H * 2 * P, W).
"""

import mlx.core as mx

from ..core import KVSpec
from ..metal_kernels.stored import share_tails
from .formats import KVFormat, make_format, rotatable, vector_bytes
from .plane import Plane, Runs, extended
from .tail_place import TailPlace

Bits = tuple[int | None, int | None]  # of keys and values; None: the activation dtype
PLAIN: Bits = (None, None)

Stored = list[list[mx.array]]  # parts (T, H, W) of keys and of values, or (T, 2 * H, W) of both


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
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        heads = spec.num_kv_heads
        self.form = (heads, spec.key_dim, spec.value_dim, bits)  # the same: kernels see no other
        self._rotates = bits[0] == 4
        formats = layer_formats(spec, dtype, bits)
        self._joined = share_tails((spec.key_dim, spec.value_dim), bits)
        self._tail_heads = 2 * heads if self._joined else heads
        self._tail_rows = self._tail_heads * 2 * page_size  # of a slot
        self._tails = [
            [mx.zeros((num_slots * self._tail_rows, width), t) for width, t in fmt.parts]
            for fmt in (formats[:1] if self._joined else formats)
        ]
        self._tail_parts = [  # (list, whose it is, place in it): one loop, once a layer and step
            (tails, which, i) for which, tails in enumerate(self._tails) for i in range(len(tails))
        ]
        shape, first = (self._tail_heads, 2 * page_size), self._tail_heads - heads
        own = slice(0, heads), slice(first, first + heads)
        num_tokens = num_pages * page_size
        self.keys = Plane(formats[0], num_tokens, self._tails[0], shape, own[0])
        self.values = Plane(formats[1], num_tokens, self._tails[-1], shape, own[1])

    def arrays(self) -> list[mx.array]:
        """Everything held, for evaluation and accounting."""
        tails = [part for tails in self._tails for part in tails]
        return [*self.keys.pages, *self.values.pages, *tails]

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails: what a step copies while another is in flight."""
        return sum(part.nbytes for tails in self._tails for part in tails)

    def rotate(self, queries: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Queries and keys (..., D) in the basis that keys are stored in."""
        if not self._rotates:
            return queries, keys
        return mx.hadamard_transform(queries), mx.hadamard_transform(keys)

    def encode(self, keys: mx.array, values: mx.array) -> Stored:
        """What is stored of keys and values (T, H, D); keys are rotated."""
        return [self.keys.fmt.encode(keys), self.values.fmt.encode(values)]

    def write_pages(self, runs: Runs, row: int, stored: Stored) -> None:
        """Store rows `row`, `row + 1`, ... in the slots of `runs`."""
        for plane, parts in zip((self.keys, self.values), self._apart(stored), strict=True):
            plane.write_pages(runs, row, parts)

    def _apart(self, stored: Stored) -> Stored:
        """Parts (T, H, W) of the keys, and of the values."""
        if len(stored) == 2:
            return stored
        return [[part[:, plane.own] for part in stored[0]] for plane in (self.keys, self.values)]

    def write_tails(self, place: TailPlace, stored: Stored) -> None:
        """Store N tokens in tails."""
        if self._joined and len(stored) == 2:
            stored = [[mx.concatenate([*pair], axis=1) for pair in zip(*stored, strict=True)]]
        rows = place.rows(self._tail_heads)
        for tails, which, i in self._tail_parts:
            tails[i] = mx.put_along_axis(tails[i], rows, stored[which][i].flatten(0, 1), 0)

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
        taken = [[mx.unflatten(part, 0, shape)[slots] for part in tails] for tails in self._tails]
        if self._joined:
            halves = [mx.split(part, 2, axis=1) for part in taken[0]]
            taken = [[part[which] for part in halves] for which in (0, 1)]
        return self.keys.fmt.decode(taken[0]), self.values.fmt.decode(taken[1])

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array) -> None:
        """Copy tail tokens (`slots`, `offsets`) to the pool slots `targets`; all (N,)."""
        for plane in (self.keys, self.values):
            taken = [tails[slots, :, offsets] for tails in plane.own_tails()]  # (N, H, W)
            for pages, part in zip(plane.pages, taken, strict=True):
                pages[:, targets] = part.swapaxes(0, 1)  # (H, N, W)

    def grow_pages(self, num_pages: int) -> None:
        """Make room for `num_pages`."""
        extra = (num_pages - self.num_pages) * self.page_size
        for plane in (self.keys, self.values):
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


def layer_formats(spec: KVSpec, dtype: mx.Dtype, bits: Bits) -> tuple[KVFormat, KVFormat]:
    """How a layer stores its keys and values."""
    assert bits[0] != 4 or rotatable(spec.key_dim), "refused before a cache is built"
    return make_format(spec.key_dim, dtype, bits[0]), make_format(spec.value_dim, dtype, bits[1])


def token_bytes(spec: KVSpec, dtype: mx.Dtype, bits: Bits) -> int:
    """Bytes that one layer keeps of one token."""
    return spec.num_kv_heads * sum(vector_bytes(f) for f in layer_formats(spec, dtype, bits))
