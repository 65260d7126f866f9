"""The KV cache during one step: who writes where, who sees what. Knows no models.

Built once per step and layer group (`GroupPlan`), used by every layer of the group (`StepKV`, which
is what a model's attention sees as `LayerKV`). Short segments (decode, verification) come first in
the flat list of tokens and go to tails; long ones (prefill chunks) go to pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.paged_attention import paged_attention
from .pages import PageTable
from .pool import LayerPool, Plane, TailPlace, tail_place
from .reach import Reach

Ints = NDArray[np.int32]

HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen
QUERY_BLOCK = 128  # prefill queries at a time where attention materialises its scores


class Span(Protocol):
    """New tokens of one sequence, as the KV cache sees them."""

    row: int  # of the first token in the step's flat list
    start: int  # its position
    num_tokens: int
    sealed: int  # positions before the tail
    slot: int  # of the tail
    tables: list[PageTable]  # one per layer group

    @property
    def stop(self) -> int:
        """One past the last position."""
        ...


@dataclass(frozen=True, slots=True)
class ShortPlan:
    """Spans of at most 8 tokens that attend together. B spans, Q tokens each (padded)."""

    rows: mx.array | slice | None  # (B * Q,) flat rows of the queries; None: all of them
    shape: tuple[int, int]  # (B, Q)
    unpad: mx.array | None  # (T',) from the padded (B * Q) outputs back to flat order
    slots: mx.array | slice  # (B,) tails
    runs: list[list[tuple[int, int]]]
    run_masks: list[mx.array | None]
    tail_mask: mx.array  # (B, 1, Q, R)


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries of a prefill chunk, and the keys that they can see."""

    queries: slice  # of the chunk's rows
    keys: slice  # of what the chunk reads
    mask: mx.array | str  # "causal", or bool (queries, keys)


@dataclass(frozen=True, slots=True)
class LongPlan:
    """One prefill chunk."""

    rows: slice  # of the step's flat list
    writes: list[tuple[int, int]]  # pool slots of the new tokens
    reads: list[tuple[int, int]]  # pool slots of all that any of them sees
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All spans of one step for one layer group."""

    short: list[ShortPlan]
    long: list[LongPlan]
    tail_rows: mx.array | None  # (N,) flat rows that go to tails; None: all of them, in order
    tail_place: TailPlace | None  # where the N tokens go; None: none does


def plan_group(
    short: Sequence[Span], long: Sequence[Span], *, group: int, reach: Reach, page_size: int
) -> GroupPlan:
    """Plan one step of layer group `group`."""
    ring = 2 * page_size
    rows, slots, positions = _tail_writes(short, long, page_size)
    num_rows = sum(span.num_tokens for span in (*short, *long))
    return GroupPlan(
        short=[_plan_short(spans, group, reach, ring, num_rows) for spans in _by_width(short)],
        long=[_plan_long(span, group, reach) for span in long],
        tail_rows=None if len(rows) == num_rows else mx.array(rows),
        tail_place=tail_place(slots, positions % ring) if len(rows) else None,
    )


def _tail_writes(
    short: Sequence[Span], long: Sequence[Span], page_size: int
) -> tuple[Ints, Ints, Ints]:
    """Flat rows, slots and positions (N,) of the tokens that go to tails.

    Of a prefill chunk that is what its last, not yet full page holds.
    """
    runs = [(s.row, s.slot, s.start, s.num_tokens) for s in short]
    for s in long:
        rest = min(s.stop % page_size, s.num_tokens)  # what came before is in the tail already
        if rest:
            runs.append((s.row + s.num_tokens - rest, s.slot, s.stop - rest, rest))
    if len(runs) < sum([count for *_, count in runs]):
        runs = [
            (row + i, slot, start + i, 1) for row, slot, start, count in runs for i in range(count)
        ]
    rows, slots, positions, _ = zip(*runs, strict=True) if runs else ((), (), (), ())
    return np.array(rows, np.int32), np.array(slots, np.int32), np.array(positions, np.int32)


def _by_width(spans: Sequence[Span]) -> list[list[Span]]:
    """Single tokens together, and the few wider spans together: padding stays small."""
    single = [span for span in spans if span.num_tokens == 1]
    wide = [span for span in spans if span.num_tokens > 1]
    return [spans for spans in (single, wide) if spans]


def _plan_short(spans: list[Span], group: int, reach: Reach, ring: int, num_rows: int) -> ShortPlan:
    counts = np.array([span.num_tokens for span in spans], np.int32)
    first = np.array([span.row for span in spans], np.int32)
    starts = np.array([span.start for span in spans], np.int32)
    sealed = np.array([span.sealed for span in spans], np.int32)
    slots = np.array([span.slot for span in spans], np.int32)
    width = int(counts.max())
    step = np.minimum(np.arange(width, dtype=np.int32), counts[:, None] - 1)  # (B, Q)
    real = np.arange(width) < counts[:, None]  # (B, Q)
    return ShortPlan(
        rows=None
        if counts.sum() == num_rows == step.size
        else _as_index((first[:, None] + step).ravel()),
        shape=(len(spans), width),
        unpad=None if real.all() else mx.array(np.flatnonzero(real)),
        slots=_as_index(slots),
        runs=_visible_runs(spans, group, reach),
        run_masks=_run_masks(spans, step, reach),
        tail_mask=mx.array(_tail_mask(starts[:, None] + step, sealed, reach, ring)),
    )


def _as_index(rows: Ints) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


def _visible_runs(spans: list[Span], group: int, reach: Reach) -> list[list[tuple[int, int]]]:
    """For each span the pool slots of the sealed positions that it sees."""
    if reach.window is None:
        return [span.tables[group].runs_before(span.sealed) for span in spans]
    return [
        [
            run
            for part in reach.ranges(span.start, span.sealed)
            for run in span.tables[group].runs(*part)
        ]
        for span in spans
    ]


def _run_masks(spans: list[Span], step: Ints, reach: Reach) -> list[mx.array | None]:
    """Additive (Q, tokens in runs): later queries of a span see less of a window's old end."""
    if reach.window is None or step.shape[1] == 1:
        return [None] * len(spans)
    masks: list[mx.array | None] = []
    for span, steps in zip(spans, step, strict=True):
        ranges = reach.ranges(span.start, span.sealed)
        keys = np.concatenate(
            [np.arange(*part, dtype=np.int32) for part in ranges] or [step[0, :0]]
        )
        seen = reach.sees(span.start + steps[:, None], keys[None])
        masks.append(mx.array(_additive(seen)) if len(keys) else None)
    return masks


def _tail_mask(positions: Ints, sealed: Ints, reach: Reach, ring: int) -> NDArray[np.float32]:
    """(B, 1, Q, R) additive: ring slot j holds the one position p >= sealed with p % R == j."""
    slots = np.arange(ring, dtype=np.int32)[None]
    held = sealed[:, None] + (slots - sealed[:, None]) % ring  # (B, R)
    return _additive(reach.sees(positions[:, :, None], held[:, None]))[:, None]


def _additive(visible: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(visible, np.float32(0.0), np.float32(HIDDEN))


def _plan_long(span: Span, group: int, reach: Reach) -> LongPlan:
    # What of its first page is there already was copied into the page as well as into the tail.
    assert span.sealed == span.start - span.start % span.tables[group].page_size, (
        "a full page is not sealed"
    )
    table = span.tables[group]
    ranges = reach.ranges(span.start, span.stop)
    return LongPlan(
        rows=slice(span.row, span.row + span.num_tokens),
        writes=table.runs(span.start, span.stop),
        reads=[run for part in ranges for run in table.runs(*part)],
        blocks=_query_blocks(span, ranges, reach),
    )


def _query_blocks(span: Span, ranges: Sequence[tuple[int, int]], reach: Reach) -> list[Block]:
    """Blocks of queries with the keys that they can see, so that no score matrix is larger.

    MLX's fused attention on Metal keeps no scores: without a window one block is best there.
    """
    whole = mx.metal.is_available() and reach.window is None
    width = span.num_tokens if whole else QUERY_BLOCK
    keys = np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in ranges])
    blocks = []
    for first in range(0, span.num_tokens, width):
        last = min(first + width, span.num_tokens)
        queries = np.arange(span.start + first, span.start + last, dtype=np.int32)
        seen = reach.sees(queries[[0, -1], None], keys[None])  # an old end leaves, a new one comes
        columns = np.flatnonzero(seen.any(axis=0))
        low, high = int(columns[0]), int(columns[-1]) + 1
        mask: mx.array | str = "causal"
        if not seen[1, low:high].all():
            mask = mx.array(reach.sees(queries[:, None], keys[None, low:high]))
        blocks.append(Block(slice(first, last), slice(low, high), mask))
    return blocks


class StepKV:
    """One layer's pool together with the plan of the step: what `LayerKV` promises."""

    __slots__ = ("_plan", "_pool")

    def __init__(self, pool: LayerPool, plan: GroupPlan) -> None:
        self._pool = pool
        self._plan = plan

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write first, then read: a view taken before a write would make the write a copy."""
        queries, keys = self._pool.rotate(queries, keys)
        self._write(self._pool.keys, keys)
        self._write(self._pool.values, values)
        parts = [self._short(plan, queries, scale, sinks) for plan in self._plan.short]
        parts += [self._long(plan, queries, scale, sinks) for plan in self._plan.long]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _write(self, plane: Plane, vectors: mx.array) -> None:
        plan = self._plan
        encoded = plane.fmt.encode(vectors)
        for long in plan.long:
            plane.write_pages(long.writes, long.rows.start, encoded)
        if plan.tail_place is not None:
            if plan.tail_rows is not None:
                encoded = [part[plan.tail_rows] for part in encoded]
            plane.write_tails(plan.tail_place, encoded)

    def _short(
        self, plan: ShortPlan, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        pool = self._pool
        num_seqs, width = plan.shape
        rows = queries if plan.rows is None else queries[plan.rows]
        outputs = paged_attention(
            rows.reshape(num_seqs, width, *queries.shape[1:]),
            [[(pool.keys.read_run(*r), pool.values.read_run(*r)) for r in rs] for rs in plan.runs],
            plan.run_masks,
            pool.keys.read_tails(plan.slots),
            pool.values.read_tails(plan.slots),
            plan.tail_mask,
            scale=scale,
            sinks=sinks,
        )
        flat = outputs.reshape(num_seqs * width, *outputs.shape[2:])  # (B * Q, heads, D)
        return flat if plan.unpad is None else flat[plan.unpad]

    def _long(
        self, plan: LongPlan, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        keys, values = (
            self._pool.keys.read_runs(plan.reads),
            self._pool.values.read_runs(plan.reads),
        )
        chunk = queries[plan.rows].swapaxes(0, 1)  # (heads, n, D)
        outputs = [
            mx.fast.scaled_dot_product_attention(
                chunk[None, :, block.queries],
                keys[None, :, block.keys],
                values[None, :, block.keys],
                scale=scale,
                mask=block.mask,
                sinks=sinks,
            )
            for block in plan.blocks
        ]
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return joined[0].swapaxes(0, 1)  # (n, heads, D)
