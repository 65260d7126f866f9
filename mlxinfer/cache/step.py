"""One step of the KV cache: where each new token is written, and how all attend. No requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..metal_kernels.heads import Form, Heads
from ..metal_kernels.kv_write import KVWrite
from ..metal_kernels.paged_attention import capped
from .groups import AttentionWindow
from .inputs import Ints, QuerySegment, Segments, StepSegments
from .pool import LayerPool, PagePool, Stored, TailPlace


class ShortPlan(Protocol):
    """How some short segments attend, in every layer of a group."""

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        ...


Part = tuple[Ints, ShortPlan]  # flat rows (T',) of some segments, in order, and how they attend
Planner = Callable[[Segments, int], Sequence[Part]]  # of segments among so many rows of a step


QUERY_BLOCK = 128  # prefill queries at a time where attention materialises its scores,
MIN_QUERY_BLOCK = 16
MAX_SCORES = 1 << 19  # fewer where keys are many: as many scores a head at once


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries of a prefill chunk, and the keys that they can see."""

    queries: slice  # of the chunk's rows
    keys: slice  # of what the chunk reads
    mask: mx.array | str  # "causal", or bool (queries, keys)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One prefill chunk."""

    rows: slice  # of the step's flat list
    writes: list[tuple[int, int]]  # pool slots of the new tokens
    reads: list[tuple[int, int]]  # pool slots of all that any of them sees
    blocks: list[Block]

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of the chunk see, (n, heads * V)."""
        keys = pool.keys.read_runs(self.reads)
        values = pool.values.read_runs(self.reads, after=keys)  # never both half decoded
        own = queries[self.rows]
        found = self.attend_to(own, keys, values, scale=scale, sinks=sinks, soft_cap=soft_cap)
        return found.flatten(1)

    def attend_to(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Queries (n, heads, D) of the chunk over what it reads, (H, S, D) and (H, S, V).

        Returns:
            (n, heads, V).
        """
        chunk = queries.swapaxes(0, 1)  # (heads, n, D)
        outputs: list[mx.array] = []
        for block in self.blocks:
            some = chunk[None, :, block.queries]
            some = mx.depends(some, outputs[-1]) if outputs else some  # one block's scores only
            seen = keys[None, :, block.keys], values[None, :, block.keys]
            if soft_cap is None:
                found = mx.fast.scaled_dot_product_attention(
                    some, *seen, scale=scale, mask=block.mask, sinks=sinks
                )
            else:
                assert sinks is None, "no model has both"
                found = capped_attention(some * scale, *seen, block.mask, soft_cap)
            outputs.append(found)
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return joined[0].swapaxes(0, 1)


def capped_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str, soft_cap: float
) -> mx.array:
    """Attention with a soft cap on its scores, which MLX's fused one does not have.

    Args:
        queries: (1, heads, n, D), scaled.
        keys, values: (1, H, S, D) and (1, H, S, V).
        mask: "causal", or bool (n, S).
        soft_cap: scores become soft_cap * tanh(score / soft_cap).

    Returns:
        (1, heads, n, V).
    """
    _, kv_heads, num_keys, _ = keys.shape
    _, num_heads, count, _ = queries.shape
    if isinstance(mask, str):
        mask = mx.arange(num_keys) <= mx.arange(num_keys - count, num_keys)[:, None]
    grouped = mx.unflatten(queries, 1, (kv_heads, -1))  # (1, H, G, n, D)
    scores = capped(grouped @ keys[:, :, None].swapaxes(-1, -2), soft_cap)
    hidden = mx.array(-mx.inf, scores.dtype)
    weights = mx.softmax(mx.where(mask, scores, hidden), axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(1, num_heads, count, -1)


def plan_chunk(segment: QuerySegment, group: int, window: AttentionWindow) -> ChunkPlan:
    """Plan one chunk for layer group `group`."""
    # What of its first page is there already was copied into the page as well as into the tail.
    assert segment.sealed == segment.start - segment.start % segment.tables[group].page_size, (
        "a full page is not sealed"
    )
    table = segment.tables[group]
    ranges = window.ranges(segment.start, segment.stop)
    return ChunkPlan(
        rows=slice(segment.row, segment.row + segment.num_tokens),
        writes=table.runs(segment.start, segment.stop),
        reads=[run for part in ranges for run in table.runs(*part)],
        blocks=_query_blocks(segment, ranges, window),
    )


def _query_blocks(
    segment: QuerySegment, ranges: Sequence[tuple[int, int]], window: AttentionWindow
) -> list[Block]:
    """Blocks of queries with the keys that they can see, so that no score matrix is larger.

    MLX's fused attention on Metal keeps no scores: without a window one block is best there.
    """
    whole = mx.metal.is_available() and window.size is None
    num_keys = sum([stop - start for start, stop in ranges])
    fitting = max(MIN_QUERY_BLOCK, min(QUERY_BLOCK, MAX_SCORES // num_keys))
    width = segment.num_tokens if whole else fitting
    keys = np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in ranges])
    blocks = []
    for first in range(0, segment.num_tokens, width):
        last = min(first + width, segment.num_tokens)
        queries = np.arange(segment.start + first, segment.start + last, dtype=np.int32)
        seen = window.sees(queries[[0, -1], None], keys[None])  # an old end leaves, a new one comes
        columns = np.flatnonzero(seen.any(axis=0))
        low, high = int(columns[0]), int(columns[-1]) + 1
        mask: mx.array | str = "causal"
        if not seen[1, low:high].all():
            mask = mx.array(window.sees(queries[:, None], keys[None, low:high]))
        blocks.append(Block(slice(first, last), slice(low, high), mask))
    return blocks


MIN_POSITIONS = 8


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All segments of one step for one layer group."""

    short: Sequence[ShortPlan]
    long: Sequence[ChunkPlan]  # after the short segments in the flat list
    parts: Sequence[ShortPlan | ChunkPlan]  # both
    num_short: int  # rows of short segments
    order: mx.array | None  # (T,) from what the parts give, one after another, to flat order
    tail_rows: mx.array | None  # (N,) flat rows that go to tails; None: all of them, in order
    tail_place: TailPlace | None  # where the N tokens go; None: none does
    positions: mx.array | None  # see padded_positions; None: no layer writes by them
    # By what the kernel does to heads; a model has one dtype.
    writes: dict[Form, KVWrite] = field(default_factory=dict)


def plan_group(
    segments: StepSegments,
    *,
    group: int,
    window: AttentionWindow,
    page_size: int,
    planner: Planner,
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
        num_short=num_short,
        order=_order(rows_of, num_rows) if len(rows_of) > 1 else None,
        tail_rows=None if len(rows) == num_rows else mx.array(rows),
        tail_place=TailPlace(slots, places % ring, ring) if len(rows) else None,
        positions=positions,
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

    __slots__ = ("_pool", "heads", "plan")

    def __init__(self, pool: LayerPool, plan: GroupPlan, heads: Heads | None = None) -> None:
        self._pool = pool
        self.plan = plan  # of the current step
        self.heads = heads

    def attend_heads(
        self,
        qkv: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Norm, rope and storage format of this step's tokens in one kernel, then as `attend`."""
        heads, positions = self.heads, self.plan.positions
        assert heads is not None
        assert positions is not None
        write = self.plan.writes.get(heads.form)
        if write is None:
            write = self.plan.writes[heads.form] = KVWrite.of(qkv, positions, heads)
        queries, stored = write(qkv, positions, heads)
        write_step(self._pool, self.plan, stored)
        return self._read(queries, scale, sinks, soft_cap)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Write first, then read: a view taken before a write would make the write a copy."""
        queries, stored = self._pool.encode(queries, keys, values, self.plan.positions)
        write_step(self._pool, self.plan, stored)
        return self._read(queries, scale, sinks, soft_cap)

    def attend_again(
        self,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Other queries (T, heads, D) over what this step has stored."""
        return self._read(self._pool.rotate(queries), scale, sinks, soft_cap)

    def _read(
        self, queries: mx.array, scale: float, sinks: mx.array | None, soft_cap: float | None
    ) -> mx.array:
        """Attend over what is stored; queries in the basis of stored keys."""
        pool, parts, order = self._pool, self.plan.parts, self.plan.order
        if len(parts) == 1:
            return parts[0].attend(pool, queries, scale=scale, sinks=sinks, soft_cap=soft_cap)
        how: dict[str, Any] = {"scale": scale, "sinks": sinks, "soft_cap": soft_cap}
        joined = mx.concatenate([part.attend(pool, queries, **how) for part in parts])
        return joined if order is None else joined[order]


def write_step(pool: PagePool, plan: GroupPlan, stored: Stored) -> None:
    """Write what is stored of the step's tokens (T, heads, W): chunks to pages, others to tails."""
    for long in plan.long:
        pool.write_pages(long.writes, long.rows.start, stored)
    if plan.tail_place is not None:
        if plan.tail_rows is not None:
            stored = [[part[plan.tail_rows] for part in parts] for parts in stored]
        pool.write_tails(plan.tail_place, stored)
