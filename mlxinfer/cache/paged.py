"""Layers that keep vectors of each token in pages and tails, and what a step prepares for them.

H = KV heads, W = width of a stored part, P = page_size, N = tokens, T = tokens of a step.

A tail is a ring of two pages per running sequence, (H, 2 * P, W): position p lies at p % (2 * P).
A decode step writes tails only. While an earlier step is in flight, MLX copies an array that is
written: tails are kilobytes a sequence, and pages would be gigabytes. If keys and values have one
format, they share tails, (2 * H, 2 * P, W), keys first, and one write a step serves both. All tails
of a part are one array of vectors, (num_slots * H * 2 * P, W).

`attention.prepare` makes a `Prepared` once a step and group.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..cache_specs import PagedSpec
from ..metal_kernels.attention_heads import Heads
from ..metal_kernels.attention_plan import AttentionPlan
from ..metal_kernels.paged_attention import AttentionCall, Softmax
from ..metal_kernels.stored import KVFormat, Plane, Runs, extended
from ..metal_kernels.variants import Fastest, ReadyFor, Variant, first_way, never
from .inputs import Ints, StepMetadata

MIN_NUMBERS = 8  # MLX passes shorter arrays in another way, as another variant of a kernel

Payload = bytes | memoryview
Tails = list[mx.array]  # each part (num_slots * heads * 2 * P, W)
Stored = list[list[mx.array]]  # parts (T, H, W) of keys and of values, or (T, 2 * H, W) of both
Formats = tuple[KVFormat, KVFormat]  # of keys and values
KeyBias = Callable[[mx.array, mx.array], mx.array]
"""`bias(positions, heads)`: what it adds to these heads (N,) of keys there, (N, D) float32.

With the rotation by rope that keys have. Positions are (N,), or (3, N) with M-RoPE.
"""
KEY_BIAS = (
    "kv_bits=4 stores keys in 4 bits, and this model adds biases to its keys that cannot be told "
    "apart from the rest, and may be too large for 4 bits beside it; use kv_bits=8 or "
    "kv_bits=(8, 4)."
)
GroupKey = tuple[int, int, bool, bool]  # window or 0, sinks, chunked, sees spans


PageWrites = Sequence[tuple[int, Runs]]
"""Of each prefill chunk: its first row of the step, and the page slots of its tokens."""


def unrotated(formats: Formats) -> Formats:
    """The formats, but keys of 8 bits are stored in their own basis.

    Keys and values of one format share arrays, so both change.
    """
    keys, values = [replace(fmt, rotates=False) if fmt.bits == 8 else fmt for fmt in formats]
    return keys, values


@dataclass(frozen=True, slots=True)
class SequencePlace:
    """The tokens of one sequence in a step, and where it and all tokens before lie."""

    rows: slice  # of the step's flat list
    start: int  # position of the first token
    runs: Runs  # page slots of its first tokens, of those that may be seen where there is a window
    pages: mx.array | None  # (n,) the pages that these lie in; None for a prefill chunk
    slot: int  # of its tail
    tail: Ints  # (N,) offsets in the tail, of the tokens that come after them
    first: int = 0  # position of the first token of `runs` and `tail`

    @property
    def stop(self) -> int:
        return self.start + self.rows.stop - self.rows.start

    def positions(self, rows: slice) -> mx.array:
        """(n, 1) positions of tokens that are these rows of the step; all are of this sequence."""
        first = self.start + rows.start - self.rows.start
        return mx.arange(first, first + rows.stop - rows.start)[:, None]

    @property
    def sealed(self) -> int:
        return self.stop - len(self.tail)


@dataclass(slots=True)
class TailPlace:
    """Where tokens of a step go in tails, the same for all layers: N of T tokens.

    Attributes:
        rows: (N,) their rows in the flat list; None: all, in order.
        slots, offsets: (N,) the tail of each, and its place in it.
        is_decode: the step has one token of each of some sequences, and no others.
        positions: (max(T, 8),) rope positions of all tokens, zeros at the end. None: no layer
            writes by positions, or tokens have three each.
        axes: (3, T) these positions then; else None.
    """

    rows: mx.array | None
    slots: Ints
    offsets: Ints
    ring: int
    is_decode: bool = False
    positions: mx.array | None = None
    axes: mx.array | None = None
    _rows: dict[int, mx.array] = field(default_factory=dict)  # by number of heads
    _marks: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)  # by that of slots

    @staticmethod
    def of(metadata: StepMetadata, page_size: int, *, by_position: bool) -> "TailPlace":
        """Read where the tokens of a step go; `by_position`: a layer writes by positions."""
        rows, slots, positions = _tail_tokens(metadata, page_size)
        short, rope = metadata.short, metadata.rope_positions if by_position else None
        return TailPlace(
            rows=None if len(rows) == len(metadata.positions) else mx.array(rows),
            slots=slots,
            offsets=positions % (2 * page_size),
            ring=2 * page_size,
            is_decode=not metadata.long and len(short) == 1 and short[0].width == 1,
            positions=padded(rope) if rope is not None and rope.ndim == 1 else None,
            axes=mx.array(rope) if rope is not None and rope.ndim == 2 else None,
        )

    def rows_of(self, heads: int) -> mx.array:
        """(N * heads, 1) the places of all vectors of the tokens, among the tails of `heads` heads.

        One index for each vector costs the host a third of the time that one index for each axis
        costs.
        """
        if heads not in self._rows:
            first = self.slots * np.int32(heads * self.ring) + self.offsets  # (N,) of head 0
            steps = np.arange(0, heads * self.ring, self.ring, dtype=np.int32)
            self._rows[heads] = mx.array((first[:, None] + steps).reshape(-1, 1))
        return self._rows[heads]

    def marks(self, num_slots: int) -> tuple[mx.array, mx.array]:
        """slot * ring + offset of each token, (N,) or 8; and (num_slots, ring) int32, 1 there."""
        if num_slots not in self._marks:
            marks = self.slots * np.int32(self.ring) + self.offsets
            taken = np.zeros((num_slots, self.ring), np.int32)
            taken.ravel()[marks] = 1
            self._marks[num_slots] = padded(marks), mx.array(taken)
        return self._marks[num_slots]


class Choice(Protocol):
    """The tokens that each token of a step sees, for a layer that does not see all earlier ones."""

    def attend(self, layer: "PagedLayer", queries: mx.array, softmax: Softmax) -> mx.array:
        """Attention of queries (T, heads, D) over stored keys and values, (T, heads * V)."""


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
    for chunk in metadata.long:
        count, start = chunk.num_tokens, int(chunk.starts[0])
        # Earlier tokens of the chunk's first page are already in the page and in the tail.
        assert chunk.sealed[0] == start - start % page_size, "a full page is not sealed"
        first, tokens = max(count - (start + count) % page_size, 0), chunk.tokens()
        parts.append((tokens[0][first:], tokens[1][first:], tokens[2][first:]))
    rows, slots, positions = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(slots), np.concatenate(positions)


def finish(arrays: object) -> None:
    """Evaluate arrays, and return when MLX no longer holds the inputs that made them.

    An evaluation may return a moment earlier: on Metal, command buffers hold inputs until their
    completion handlers have run. MLX writes a page in place only if nothing else holds it.
    Otherwise it copies the page, and no result shows that.
    """
    mx.eval(arrays)
    mx.synchronize()  # the stream of this thread, on which all is computed


def _page_slots(pages: Sequence[int], page_size: int) -> mx.array:
    """(N * P,) page slots of N pages, in order."""
    starts = np.array(pages, dtype=np.int32)[:, None] * page_size
    return mx.array((starts + np.arange(page_size, dtype=np.int32)).reshape(-1))


def read_payloads(planes: Sequence[Plane], pages: Sequence[int], page_size: int) -> list[bytes]:
    """The payloads of pages: the parts of each plane, (H, P, W) in their own format."""
    slots, parts = _page_slots(pages, page_size), []
    for plane in planes:
        for array in plane.pages:
            taken = mx.unflatten(array[:, slots], 1, (len(pages), -1))  # (H, N, P, W)
            taken = mx.contiguous(taken.swapaxes(0, 1))  # (N, H, P, W)
            parts.append(taken.view(mx.uint8).flatten(1))
    rows = mx.concatenate(parts, axis=1)  # (N, bytes of a page)
    finish(rows)  # others may be written next
    return [row.tobytes() for row in np.array(rows, copy=False)]


def write_payloads(
    planes: Sequence[Plane], pages: Sequence[int], payloads: Sequence[Payload], page_size: int
) -> None:
    rows = mx.array(np.stack([np.frombuffer(payload, dtype=np.uint8) for payload in payloads]))
    slots, start = _page_slots(pages, page_size), 0
    for plane in planes:
        for i in range(len(plane.pages)):  # in place: no other name holds an array
            heads, _, width = plane.pages[i].shape
            shape, dtype = (heads, page_size, width), plane.pages[i].dtype
            stop = start + prod(shape) * dtype.size
            part = mx.unflatten(mx.contiguous(rows[:, start:stop]).view(dtype), 1, shape)
            plane.pages[i][:, slots] = part.swapaxes(0, 1).flatten(1, 2)  # (H, N * P, W)
            start = stop
    assert start == rows.shape[1], "a payload of another format"
    mx.eval([plane.pages for plane in planes])


def part_bytes(parts: Sequence[tuple[int, mx.Dtype]]) -> int:
    return sum(width * kind.size for width, kind in parts)


class PagedLayer:
    """One layer that keeps vectors of each token, in one plane or several.

    It knows its bytes from the beginning; `allocate` makes its arrays.

    Args:
        kinds: format and numbers of the vectors of each plane.
        joined: two planes of one format share their tails.

    Attributes:
        form: what kernels are compiled for; layers of one form share them.
        prepared: the current step, as `attention.prepare` gave it for the layer's group.
        read_bytes: of one token's keys and values, as they are attended to.
        ready: for how many query tokens of a sequence the attention kernel may be used.
        fastest: of several ways in which short segments attend, for query tokens and sequences.
        fastest_prompt: the same of a prefill chunk, for its tokens.
        head_writer: norm, rope and storage format in one kernel; None: the mixer does them.
        step_head_writer: the same in this step; None: the mixer does them.
        writes_tails: decode steps write to tails in the kernel of `head_writer`.
        subtracts_bias: what a bias adds to keys is not stored, see `KeyValueLayer`.
        bias: of keys; set where it is subtracted.
    """

    is_paged = True
    whole_pages = False  # whether a sequence can go on only where a page ends
    state_bytes = 0  # of a sequence as a whole
    subtracts_bias = False
    form: Hashable
    keys: Plane
    values: Plane
    prepared: Any
    step_head_writer: Heads | None
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
        self.fastest: Fastest = first_way
        self.fastest_prompt: Fastest = first_way
        self.writes_tails = False
        self.head_writer: Heads | None = None
        self.num_slots = self.num_pages = self.page_size = 0
        self.planes: list[Plane] = []
        self._kinds, self._num_heads, self._joined = kinds, heads, joined
        self._num_tail_heads = 2 * heads if joined else heads
        self.read_bytes = spec.numbers * dtype.size
        self.token_bytes = heads * sum(part_bytes(fmt.parts(dim, dtype)) for fmt, dim in kinds)
        self.tail_bytes_each = heads * sum(
            part_bytes(fmt.tail_parts(dim, dtype)) for fmt, dim in kinds
        )

    def take_from(self, mixer: Any) -> None:
        """Take what storing needs of the layer's mixer; by default nothing."""
        return

    @property
    def group_key(self) -> GroupKey:
        """Layers with the same key keep the same positions, and share page tables."""
        return self.spec.window or 0, self.spec.sinks, False, False

    def allocate(self, page_size: int, num_pages: int, num_slots: int) -> None:
        self.page_size, self.num_pages, self.num_slots = page_size, num_pages, num_slots
        heads, kinds = self._num_heads, self._kinds
        self._tail_rows = self._num_tail_heads * 2 * page_size  # of a slot
        self._tails = [
            [
                mx.zeros((num_slots * self._tail_rows, width), kind)
                for width, kind in fmt.tail_parts(dim, self.dtype)
            ]
            for fmt, dim in (kinds[:1] if self._joined else kinds)
        ]
        self._tail_parts = [  # (list, its plane, place in it): one loop, once a layer and step
            (tails, which, i) for which, tails in enumerate(self._tails) for i in range(len(tails))
        ]
        self.planes = []
        for i, (fmt, dim) in enumerate(kinds):
            pages = [
                mx.zeros((heads, num_pages * page_size, width), kind)
                for width, kind in fmt.parts(dim, self.dtype)
            ]
            tails, first = self._tails[0 if self._joined else i], i * heads if self._joined else 0
            self.planes.append(
                Plane(fmt, pages, tails, dim, self._num_tail_heads, first, dtype=self.dtype)
            )
        self.keys, self.values = self.views()

    @property
    def by_position(self) -> bool:
        return self.subtracts_bias or self.head_writer is not None

    def views(self) -> tuple[Plane, Plane]:
        return self.planes[0], self.planes[-1]

    def attention_variants(self, mixer: Any) -> dict[int, Variant]:
        """The kernel for short segments, by query tokens; numbers without one are left out.

        `mixer`: of the layer.
        """
        return {}

    def prefill_variant(self, mixer: Any) -> Variant | None:
        """The kernel for prefill chunks; None: there is none, or MLX's fused attention serves."""
        return None

    def heads_of(self, mixer: Any) -> Heads | None:
        """The kernel that takes the mixer's projection apart; None: there is no such kernel."""
        return None

    def plan_heads(self, num_heads: int, width: int) -> int:
        """KV heads for which a kernel's threadgroups are planned.

        Args:
            width: query tokens of the longest segment.
        """
        return self._num_heads

    def kernel(self, queries: mx.array, plan: AttentionPlan, softmax: Softmax) -> AttentionCall:
        """The launches of the Metal kernel for queries (N, heads, D)."""
        raise AssertionError("no kernel reads this layer")

    def kernel_arrays(self) -> list[mx.array]:
        """The arrays that the kernel reads."""
        return [*self.keys.tails, *self.keys.pages]

    def arrays(self) -> list[mx.array]:
        """Everything held, for evaluation and accounting."""
        pages = [part for plane in self.planes for part in plane.pages]
        return [*pages, *[part for tails in self._tails for part in tails]]

    def write(self, stored: Stored, place: TailPlace, pages: PageWrites = ()) -> None:
        """Store the parts (T, heads, W) of a step's tokens: chunks in pages, others in tails."""
        for row, runs in pages:
            self.write_pages(runs, row, stored)
        if not len(place.slots):
            return
        if place.rows is not None:
            stored = [[part[place.rows] for part in parts] for parts in stored]
        if self._joined and len(stored) == 2:
            keys, values = stored
            stored = [[]]
            for key, value in zip(keys, values, strict=True):
                stored[0].append(mx.concatenate([key, value], axis=1))
        rows = place.rows_of(self._num_tail_heads)
        for tails, which, i in self._tail_parts:
            tails[i] = mx.put_along_axis(tails[i], rows, stored[which][i].flatten(0, 1), 0)

    def write_pages(self, runs: Runs, row: int, stored: Stored) -> None:
        """Store rows `row`, `row + 1`, ... in the slots of `runs`."""
        if len(stored) < len(self.planes):
            stored = [[part[:, plane.own] for part in stored[0]] for plane in self.planes]
        for plane, parts in zip(self.planes, stored, strict=True):
            plane.write_pages(runs, row, parts)

    def tail_parts(self) -> list[mx.array]:
        """The parts of tails: of keys and values together, or of keys and then of values."""
        return [tails[i] for tails, _, i in self._tail_parts]

    def replace_tails(self, parts: Sequence[mx.array]) -> None:
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
        shape = (-1, self._num_tail_heads, 2 * self.page_size)
        layout, other = self.keys, self.values
        keys: list[mx.array] = []
        values = keys if layout.tails is other.tails and not self._joined else []
        for part in layout.tails:
            taken = mx.unflatten(part, 0, shape)[slots]  # (B, H or 2 * H, 2 * P, W)
            if self._joined:
                taken, of_values = mx.split(taken, 2, axis=1)
                values.append(of_values)
            keys.append(taken)
        for part in other.tails if layout.tails is not other.tails else ():
            values.append(mx.unflatten(part, 0, shape)[slots])
        return (
            keys[0] if layout.as_stored else layout.decode(keys),
            values[0] if other.as_stored else other.decode(values),
        )

    def read_whole(self, plane: Plane, place: SequencePlace) -> mx.array:
        """(H, S, D) of all tokens of a sequence, in order."""
        parts = [plane.read_runs(place.runs)] if place.runs else []
        if len(place.tail):
            vectors = plane.decode([part[place.slot] for part in plane.own_tails(self.page_size)])
            parts.append(vectors[:, mx.array(place.tail)])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def read_tokens(self, plane: Plane, place: SequencePlace, tokens: mx.array) -> mx.array:
        """(H, n, K, D) of some tokens of a short segment's sequence, gathered.

        `tokens`: (n, K), or (H, n, K) of each head.
        """
        assert place.pages is not None, "chunks read all that they see"
        size, tokens = self.page_size, mx.minimum(tokens, place.stop - 1)
        offsets = tokens % (2 * size)
        heads = mx.arange(len(plane.pages[0]))[:, None, None]
        tails = [part[place.slot][heads, offsets] for part in plane.own_tails(size)]
        if place.runs:
            numbers = mx.minimum(tokens // size, len(place.pages) - 1)
            slots = place.pages[numbers] * size + tokens % size
            is_sealed = (tokens < place.sealed)[..., None]
            pairs = zip(plane.pages, tails, strict=True)
            tails = [mx.where(is_sealed, pages[heads, slots], tail) for pages, tail in pairs]
        return plane.decode(tails)

    def seal(self, slots: mx.array, offsets: mx.array, targets: mx.array, before: mx.array) -> None:
        """Copy tail tokens (`slots`, `offsets`) to the page slots `targets`; all (N,).

        `before`: the page slot of the token that stands a page before each; negative: none does.
        """
        for plane in self.planes:
            # (N, H, W)
            taken = [tails[slots, :, offsets] for tails in plane.own_tails(self.page_size)]
            for pages, part in zip(plane.pages, taken, strict=True):
                pages[:, targets] = part.swapaxes(0, 1)  # (H, N, W)

    def rotate(self, heads: mx.array) -> mx.array:
        return heads

    def rotate_values(self, values: mx.array) -> mx.array:
        return values

    def grow_pages(self, num_pages: int) -> None:
        extra = (num_pages - self.num_pages) * self.page_size
        for plane in self.planes:
            plane.grow_pages(extra)
        self.num_pages = num_pages

    def resize_tails(self, num_slots: int) -> None:
        """Keep tails of the first `num_slots` slots, or add empty ones."""
        rows = num_slots * self._tail_rows
        for tails in self._tails:
            # In place: planes hold the same lists.
            tails[:] = [
                extended(part[:rows], axis=0, extra=max(rows - len(part), 0)) for part in tails
            ]
            mx.eval(tails)
        self.num_slots = num_slots
