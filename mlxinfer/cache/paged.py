"""Layers that keep vectors of each token in pages and tails, and what a step prepares for them.

An attention backend has `prepare(metadata, group, number, place) -> Prepared`, once a step and
group. There are two: `plain.PlainAttention` in MLX's own operations, and `metal.MetalAttention`
with kernels.

H = KV heads, W = width of a stored part, P = page_size, N = tokens, T = tokens of a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..core import PagedSpec
from ..metal_kernels.attention_plan import AttentionPlan
from ..metal_kernels.attention_reduce import Attention
from ..metal_kernels.heads import Heads
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.stored import KVFormat
from ..metal_kernels.variants import ReadyFor, Variant, never
from .inputs import Ints, StepMetadata
from .planes import Plane, Runs, Stored, TailPlace, extended, vector_bytes

Formats = tuple[KVFormat, KVFormat]  # of keys and values
KeyBias = Callable[[mx.array, mx.array], mx.array]
"""`bias(positions, heads)`, both (N,): what it adds to these heads of keys there, (N, D) float32.

With the rotary turn that keys have.
"""
KEY_BIAS = (
    "kv_bits=4 stores keys in 4 bits, and this model adds biases to its keys that cannot be told "
    "apart from the rest, and may be too large for 4 bits beside it; use kv_bits=8 or "
    "kv_bits=(8, 4)."
)
GroupKey = tuple[bool, int, int, bool]  # latent, window or 0, sinks, chunked


class Part(Protocol):
    """Some rows of a step that attend together."""

    @property
    def rows(self) -> slice | mx.array | None:
        """Which rows of the flat list the queries are; None: all, in order."""
        ...

    def attend(self, layer: "PagedLayer", queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (N, heads, D) of `rows` -> what these rows see, (T', heads * V)."""
        ...


class Prepared:
    """All that the layers of a group share in one step.

    Args:
        metadata: of the step.
        number: which of the page tables is the group's.
        place: where tokens go in tails.
        short: rows of each part of short segments in the flat list, and how they attend.
        chunks: prefill chunks (`plain.Chunk`), which come last in the flat list.
        tiles: the same chunks through a kernel, for layers that have one.
    """

    __slots__ = ("_order", "_parts", "_tiled", "chunks", "metadata", "number", "place", "short")

    def __init__(
        self,
        metadata: StepMetadata,
        number: int,
        place: TailPlace,
        short: Sequence[tuple[Ints, Part]],
        chunks: Sequence[Any],
        tiles: Part | None = None,
    ) -> None:
        self.metadata, self.number, self.place = metadata, number, place
        self.short = [part for _, part in short]
        self.chunks = chunks
        self._parts: list[Part] = [*self.short, *chunks]
        self._tiled = self._parts if tiles is None else [*self.short, tiles]
        self._order = _order([rows for rows, _ in short], len(metadata.positions))

    @property
    def num_short(self) -> int:
        """Rows of short segments, which come first in the flat list."""
        chunks = self.metadata.long
        return chunks[0].row if chunks else len(self.metadata.positions)

    def write(self, layer: "PagedLayer", stored: Stored) -> None:
        """Write the parts (T, heads, W) of the step's tokens: chunks to pages, others to tails."""
        for chunk in self.chunks:
            layer.write_pages(chunk.writes, chunk.rows.start, stored)
        place = self.place
        if len(place.slots):
            if place.rows is not None:
                stored = [[part[place.rows] for part in parts] for parts in stored]
            layer.write_tails(place, stored)

    def attend(self, layer: "PagedLayer", queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (T, heads, D) of all rows over what is stored, (T, heads * V)."""
        parts = self._tiled if layer.tiles else self._parts
        if len(parts) == 1:
            return attend_rows(parts[0], layer, queries, softmax)
        return self.joined([attend_rows(part, layer, queries, softmax) for part in parts])

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Outputs of all parts, (T, ...) in flat order."""
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate([*outputs])
        return joined if self._order is None else joined[self._order]


def attend_rows(part: Part, layer: "PagedLayer", queries: mx.array, softmax: Softmax) -> mx.array:
    """What the rows of one part see, (T', heads * V); queries (T, heads, D) of all rows."""
    return part.attend(layer, queries if part.rows is None else queries[part.rows], softmax)


def _order(parts: Sequence[Ints], num_rows: int) -> mx.array | None:
    """(T,) where each row of the step stands when those of `parts` come first; None: in place."""
    if len(parts) < 2:
        return None
    rows = np.concatenate(parts)
    if (np.diff(rows) > 0).all():
        return None
    order = np.arange(num_rows, dtype=np.int32)
    order[rows] = np.arange(len(rows), dtype=np.int32)
    return mx.array(order)


class PagedLayer(ABC):
    """One layer that keeps vectors of each token, in one plane or several.

    It knows its bytes from the beginning; `allocate` makes its arrays.

    Args:
        spec: what the layer keeps.
        formats: of keys and values.
        dtype: of activations.
        kinds: format and numbers of the vectors of each plane.
        heads: of each plane.
        joined: two planes of one format share their tails.

    Attributes:
        form: what kernels are compiled for; layers of one form share them.
        keys, values: the planes as attention reads them.
        prepared: the current step, as the layer's group prepared it.
        token_bytes: that are kept of one token.
        ready: for how many query tokens of a sequence the attention kernel may be used.
        tiles: prefill chunks attend through a kernel.
        write_heads: norm, rope and storage format in one kernel; None: the mixer does them.
        writes_tails: decode steps write to tails in the kernel of `write_heads`.
        subtracts_bias: what a bias adds to keys is not stored, see `KeyValueLayer`.
        bias: of keys; set where it is subtracted.
    """

    is_paged = True
    state_bytes = 0  # of a sequence as a whole
    subtracts_bias = False
    form: Hashable
    keys: Plane
    values: Plane
    prepared: Prepared
    bias: KeyBias

    def __init__(
        self,
        spec: PagedSpec,
        formats: Formats,
        dtype: mx.Dtype,
        kinds: Sequence[tuple[KVFormat, int]],
        *,
        heads: int,
        joined: bool = False,
    ) -> None:
        self.spec, self.formats, self.dtype = spec, formats, dtype
        self.ready: ReadyFor = never
        self.tiles = self.writes_tails = False
        self.write_heads: Heads | None = None
        self.num_slots = self.num_pages = self.page_size = 0
        self.planes: list[Plane] = []
        self._kinds, self._heads, self._joined = kinds, heads, joined
        self._tail_heads = 2 * heads if joined else heads
        self.token_bytes = heads * sum(vector_bytes(fmt, dim, dtype) for fmt, dim in kinds)

    def take_from(self, mixer: Any) -> None:
        """Take what storing needs of the layer's mixer; by default nothing."""
        return

    @property
    def group_key(self) -> GroupKey:
        """Layers with the same key keep the same positions, and share page tables."""
        return False, self.spec.window or 0, self.spec.sinks, False

    def allocate(self, page_size: int, num_pages: int, num_slots: int) -> None:
        """Make empty pages and tails."""
        self.page_size, self.num_pages, self.num_slots = page_size, num_pages, num_slots
        heads, kinds = self._heads, self._kinds
        self._tail_rows = self._tail_heads * 2 * page_size  # of a slot
        self._tails = [
            [
                mx.zeros((num_slots * self._tail_rows, width), kind)
                for width, kind in fmt.parts(dim, self.dtype)
            ]
            for fmt, dim in (kinds[:1] if self._joined else kinds)
        ]
        self._tail_parts = [  # (list, its plane, place in it): one loop, once a layer and step
            (tails, which, i) for which, tails in enumerate(self._tails) for i in range(len(tails))
        ]
        self.planes = []
        for i, (fmt, dim) in enumerate(kinds):
            first = i * heads if self._joined else 0
            plane = Plane(
                fmt,
                dim,
                self.dtype,
                num_tokens=num_pages * page_size,
                tails=self._tails[0 if self._joined else i],
                tail_shape=(self._tail_heads, 2 * page_size),
                own=slice(first, first + heads),
            )
            self.planes.append(plane)
        self.keys, self.values = self.views()

    @property
    def by_position(self) -> bool:
        """Whether the layer writes by the positions of tokens."""
        return self.subtracts_bias or self.write_heads is not None

    def views(self) -> tuple[Plane, Plane]:
        """The planes as attention reads keys and values."""
        return self.planes[0], self.planes[1]

    @abstractmethod
    def attention_variants(self, mixer: Any) -> dict[int, Variant]:
        """The kernel for short segments, by query tokens; numbers without one are left out.

        `mixer`: of the layer.
        """

    @abstractmethod
    def prefill_variant(self, mixer: Any) -> Variant | None:
        """The kernel for prefill chunks; None: there is none, or MLX's fused attention serves."""

    def heads_of(self, mixer: Any) -> Heads | None:
        """What one kernel does to the mixer's projection; None: there is no such kernel."""
        return None

    @abstractmethod
    def plan_heads(self, num_heads: int, width: int) -> int:
        """KV heads for which a kernel's threadgroups are planned.

        Args:
            num_heads: of queries.
            width: query tokens of the longest segment.
        """

    @abstractmethod
    def kernel(self, queries: mx.array, plan: AttentionPlan, softmax: Softmax) -> Attention:
        """The launches of the Metal kernel for queries (N, heads, D)."""

    @abstractmethod
    def kernel_arrays(self) -> list[mx.array]:
        """The arrays that the kernel reads."""

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
        if len(stored) < len(self.planes):
            stored = [[part[:, plane.own] for part in stored[0]] for plane in self.planes]
        for plane, parts in zip(self.planes, stored, strict=True):
            plane.write_pages(runs, row, parts)

    def write_tails(self, place: TailPlace, stored: Stored) -> None:
        """Store N tokens in tails."""
        if self._joined and len(stored) == 2:
            pairs = zip(*stored, strict=True)
            stored = [[mx.concatenate([*pair], axis=1) for pair in pairs]]
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
        lists = [self.keys.tails]
        if self.values.tails is not self.keys.tails:
            lists.append(self.values.tails)
        parts = [[mx.unflatten(part, 0, shape)[slots] for part in tails] for tails in lists]
        if self._joined:
            pairs = [mx.split(part, 2, axis=1) for part in parts[0]]
            parts = [[pair[which] for pair in pairs] for which in range(2)]
        return self.keys.decode(parts[0]), self.values.decode(parts[-1])

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array) -> None:
        """Copy tail tokens (`slots`, `offsets`) to the page slots `targets`; all (N,)."""
        for plane in self.planes:
            taken = [tails[slots, :, offsets] for tails in plane.own_tails()]  # (N, H, W)
            for pages, part in zip(plane.pages, taken, strict=True):
                pages[:, targets] = part.swapaxes(0, 1)  # (H, N, W)

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
