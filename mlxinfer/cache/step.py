"""One step of the KV cache: where each new token is written, and how all attend. No requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..metal_kernels.heads import Form, Heads
from ..metal_kernels.kv_write import KVWrite
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.tail_write import write_tails
from .chunk_attention import ChunkPlan, plan_chunk
from .groups import AttentionWindow
from .inputs import Ints, QuerySegment, Segments, StepSegments
from .joint import JointPool
from .pool import LayerPool, PagePool, Stored, TailPlace


class ShortPlan(Protocol):
    """How some short segments attend, in every layer of a group."""

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        ...


Part = tuple[Ints, ShortPlan]  # flat rows (T',) of some segments, in order, and how they attend
Planner = Callable[[Segments, int], Sequence[Part]]  # of segments among so many rows of a step
ChunkPlanner = Callable[[Sequence[QuerySegment]], ShortPlan]  # of all prefill chunks of a step


MIN_POSITIONS = 8


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All segments of one step for one layer group."""

    short: Sequence[ShortPlan]
    long: Sequence[ChunkPlan]  # after the short segments in the flat list
    parts: Sequence[ShortPlan]  # how both attend
    tiled_parts: Sequence[ShortPlan]  # the same where prefill chunks have a kernel
    segments: StepSegments
    group: int  # which of the segments' page tables
    num_short: int  # rows of short segments
    order: mx.array | None  # (T,) from what the parts give, one after another, to flat order
    tail_rows: mx.array | None  # (N,) flat rows that go to tails; None: all of them, in order
    tail_place: TailPlace | None  # where the N tokens go; None: none does
    positions: mx.array | None  # see padded_positions; None: no layer writes by them
    is_decode: bool  # one token of each sequence, all of which go to tails, in order
    # By what the kernel does to heads; a model has one dtype.
    writes: dict[Form, KVWrite] = field(default_factory=dict)


def plan_group(
    segments: StepSegments,
    *,
    group: int,
    window: AttentionWindow,
    page_size: int,
    planner: Planner,
    prefill: ChunkPlanner | None = None,
    positions: mx.array | None = None,
    short_apart: bool = False,
) -> GroupPlan:
    """Plan one step of a layer group.

    Args:
        segments: of the step.
        group: which of the page tables is the group's.
        window: which positions its layers keep.
        page_size: tokens a page.
        planner: of short segments.
        prefill: of prefill chunks in layers that have a kernel for them; None: no layer has.
        positions: as `padded_positions` gives them; None: no layer writes by them.
        short_apart: the plans of short segments are handed their own rows only, not all T.
    """
    ring = 2 * page_size
    rows, slots, places = _tail_writes(segments.short, segments.long, page_size)
    num_rows = len(segments.positions)
    num_short = segments.long[0].row if segments.long else num_rows
    short: list[ShortPlan] = []
    rows_of: list[Ints] = []
    for some in segments.short:
        for own_rows, plan in planner(some, num_short if short_apart else num_rows):
            rows_of.append(own_rows)
            short.append(plan)
    long = [plan_chunk(segment, group, window) for segment in segments.long]
    return GroupPlan(
        short=short,
        long=long,
        parts=[*short, *long],
        tiled_parts=[*short, prefill(segments.long)] if prefill and long else [*short, *long],
        segments=segments,
        group=group,
        num_short=num_short,
        order=_order(rows_of, num_rows) if len(rows_of) > 1 else None,
        tail_rows=None if len(rows) == num_rows else mx.array(rows),
        tail_place=TailPlace(slots, places % ring, ring) if len(rows) else None,
        positions=positions,
        is_decode=not long and max([some.width for some in segments.short], default=1) == 1,
    )


def _order(parts: Sequence[Ints], num_rows: int) -> mx.array | None:
    """(T,) where each row of the step stands when those of `parts` come first; None: in place."""
    rows = np.concatenate(parts)
    if (np.diff(rows) > 0).all():
        return None
    order = np.arange(num_rows, dtype=np.int32)
    order[rows] = np.arange(len(rows), dtype=np.int32)
    return mx.array(order)


def padded_positions(positions: Ints) -> mx.array:
    """(T,) -> (max(T, 8),), zeros at the end: fewer would be another variant of the kernel."""
    if len(positions) >= MIN_POSITIONS:
        return mx.array(positions)
    padded = np.zeros(MIN_POSITIONS, np.int32)
    padded[: len(positions)] = positions
    return mx.array(padded)


def _tail_writes(
    short: Sequence[Segments], long: Sequence[QuerySegment], page_size: int
) -> tuple[Ints, Ints, Ints]:
    """Flat rows, slots and positions (N,) of the tokens that go to tails.

    Of a prefill chunk that is what its last, not yet full page holds.
    """
    if len(short) == 1 and not long:
        return short[0].tokens()
    parts = [segments.tokens() for segments in short]
    for s in long:
        rest = min(s.stop % page_size, s.num_tokens)  # what came before is in the tail already
        step = np.arange(-rest, 0, dtype=np.int32)
        parts.append((s.row + s.num_tokens + step, np.full_like(step, s.slot), s.stop + step))
    if len(parts) == 1:
        return parts[0]
    rows, slots, positions = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(slots), np.concatenate(positions)


class StepKV:
    """One attention layer's cache during one step: its pool, and the plan of the step."""

    __slots__ = ("_pool", "_tiles", "heads", "plan", "writes_tails")

    def __init__(
        self,
        pool: LayerPool | JointPool,
        plan: GroupPlan,
        heads: Heads | None = None,
        *,
        tiles: bool = False,
        writes_tails: bool = False,
    ) -> None:
        self._pool = pool
        self.writes_tails = writes_tails  # of decode steps, in the kernel that writes heads
        self._tiles = tiles  # prefill chunks attend through the kernel
        self.plan = plan  # of the current step
        self.heads = heads

    def attend_heads(
        self,
        qkv: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Norm, rope and storage format of this step's tokens in one kernel, then as `attend`."""
        heads, positions = self.heads, self.plan.positions
        assert heads is not None
        assert positions is not None
        if self.writes_tails and self.plan.is_decode:
            place, pool = self.plan.tail_place, self._pool
            assert place is not None
            marks = place.marks(pool.num_slots)
            queries, *tails = write_tails(qkv, positions, heads, *marks, pool.tail_parts())
            pool.replace_tails(tails)
            return self._read(queries, softmax)
        write = self.plan.writes.get(heads.form)
        if write is None:
            write = self.plan.writes[heads.form] = KVWrite.of(qkv, positions, heads)
        queries, stored = write(qkv, positions, heads)
        write_step(self._pool, self.plan, stored)
        return self._read(queries, softmax)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Store keys and values, then attend over all that each token may see.

        Written first, since a view taken before a write would make the write a copy.
        """
        queries, stored = self._pool.encode(queries, keys, values, self.plan.positions)
        write_step(self._pool, self.plan, stored)
        return self._read(queries, softmax)

    def attend_again(
        self,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Other queries (T, heads, D) over what this step has stored."""
        return self._read(self._pool.rotate(queries), softmax)

    def _read(self, queries: mx.array, softmax: Softmax) -> mx.array:
        """Attend over what is stored, with queries in the basis of stored keys."""
        pool, order = self._pool, self.plan.order
        parts = self.plan.tiled_parts if self._tiles else self.plan.parts
        if len(parts) == 1:
            return pool.restored(parts[0].attend(pool, queries, softmax))
        joined = mx.concatenate([part.attend(pool, queries, softmax) for part in parts])
        return pool.restored(joined if order is None else joined[order])


def write_step(pool: PagePool, plan: GroupPlan, stored: Stored) -> None:
    """Write what is stored of the step's tokens (T, heads, W): chunks to pages, others to tails."""
    for long in plan.long:
        pool.write_pages(long.writes, long.rows.start, stored)
    if plan.tail_place is not None:
        if plan.tail_rows is not None:
            stored = [[part[plan.tail_rows] for part in parts] for parts in stored]
        pool.write_tails(plan.tail_place, stored)
