"""The KV cache during one step: who writes where, who sees what. Knows no models.

Built once per step and layer group (`GroupPlan`), used by every layer of the group (`StepKV`, which
is what a model's attention sees as `LayerKV`). Short segments (decode, verification) come first in the
flat list of tokens and go to tails; long ones (prefill chunks) go to pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..metal_kernels.paged_attention import paged_attention
from .pages import PageTable
from .pool import LayerPool

HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen
QUERY_BLOCK = 128  # prefill queries at a time where attention materialises its scores


@dataclass(slots=True)
class Span:
    """New tokens of one sequence, as a layer group sees them."""

    row: int  # of the first token in the step's flat list
    start: int  # its position
    num_tokens: int
    sealed: int  # positions before the tail
    slot: int  # of the tail
    tables: list[PageTable]  # one per layer group

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ShortPlan:
    """Spans of at most 8 tokens that attend together. B spans, Q tokens each (padded)."""

    rows: mx.array | slice  # (B * Q,) flat rows of the queries
    shape: tuple[int, int]  # (B, Q)
    unpad: mx.array | None  # (T',) from the padded (B * Q) outputs back to flat order
    slots: mx.array | slice  # (B,) tails
    runs: list[list[tuple[int, int]]]
    run_masks: list[mx.array | None]
    tail_mask: mx.array  # (B, 1, Q, R)


@dataclass(frozen=True, slots=True)
class LongPlan:
    """One prefill chunk."""

    row: int
    num_tokens: int
    writes: list[tuple[int, int]]  # pool slots of the new tokens
    reads: list[tuple[int, int]]  # pool slots of all that any of them sees
    blocks: list[tuple[int, int, int, int, mx.array | str | None]]
    # (first query, past the last, first key, past the last, mask): rows of the chunk and of `reads`


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All spans of one step for one layer group."""

    short: list[ShortPlan]
    long: list[LongPlan]
    tail_rows: mx.array | None  # (N,) flat rows that go to tails; None: all of them, in order
    tail_place: tuple[mx.array, mx.array] | None  # slots and offsets (N,); None: nothing does


def plan_group(
    short: Sequence[Span], long: Sequence[Span], *, group: int, window: int | None, page_size: int
) -> GroupPlan:
    """Plan one step of layer group `group`, whose tokens see `window` positions (None: all)."""
    ring = 2 * page_size
    rows, slots, positions = _tail_writes(short, long, page_size)
    num_rows = sum(span.num_tokens for span in (*short, *long))
    return GroupPlan(
        short=[_plan_short(spans, group, window, ring) for spans in _by_width(short)],
        long=[_plan_long(span, group, window) for span in long],
        tail_rows=None if len(rows) == num_rows else mx.array(rows),
        tail_place=(mx.array(slots), mx.array(positions % ring)) if len(rows) else None,
    )


def _tail_writes(
    short: Sequence[Span], long: Sequence[Span], page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat rows, slots and positions (N,) of the tokens that go to tails.

    Of a prefill chunk that is what its last, not yet full page holds.
    """
    starts = [(s.row, s.start, s.slot, s.num_tokens) for s in short]
    for s in long:
        rest = s.stop % page_size
        if rest:
            starts.append((s.row + s.num_tokens - rest, s.stop - rest, s.slot, rest))
    if all(count == 1 for *_, count in starts):
        table = np.array(starts, dtype=np.int32).reshape(-1, 4)
        return table[:, 0], table[:, 2], table[:, 1]
    expanded = np.array(
        [(row + i, slot, start + i) for row, start, slot, count in starts for i in range(count)],
        dtype=np.int32,
    )
    return expanded[:, 0], expanded[:, 1], expanded[:, 2]


def _by_width(spans: Sequence[Span]) -> list[list[Span]]:
    """Single tokens together, and the few wider spans together: padding stays small."""
    single = [span for span in spans if span.num_tokens == 1]
    wide = [span for span in spans if span.num_tokens > 1]
    return [spans for spans in (single, wide) if spans]


def _plan_short(spans: list[Span], group: int, window: int | None, ring: int) -> ShortPlan:
    width = max(span.num_tokens for span in spans)
    counts = np.array([span.num_tokens for span in spans], dtype=np.int32)
    first = np.array([span.row for span in spans], dtype=np.int32)
    starts = np.array([span.start for span in spans], dtype=np.int32)
    sealed = np.array([span.sealed for span in spans], dtype=np.int32)
    step = np.minimum(np.arange(width, dtype=np.int32)[None], counts[:, None] - 1)  # (B, Q)
    rows = (first[:, None] + step).reshape(-1)
    padded = width > 1 and bool((counts < width).any())
    return ShortPlan(
        rows=_as_index(rows),
        shape=(len(spans), width),
        unpad=mx.array(np.flatnonzero(_first_of_each(step, counts))) if padded else None,
        slots=_as_index(np.array([span.slot for span in spans], dtype=np.int32)),
        runs=[_visible_runs(span, group, window) for span in spans],
        run_masks=[_run_mask(span, window, width) for span in spans],
        tail_mask=mx.array(_tail_mask(starts[:, None] + step, sealed, window, ring)),
    )


def _first_of_each(step: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(B, Q) whether a padded query is a real one."""
    return np.arange(step.shape[1])[None] < counts[:, None]


def _as_index(rows: np.ndarray) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


def _lowest_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _visible_runs(span: Span, group: int, window: int | None) -> list[tuple[int, int]]:
    lowest = _lowest_visible(span.start, window)
    return span.tables[group].runs(lowest, span.sealed) if lowest < span.sealed else []


def _run_mask(span: Span, window: int | None, width: int) -> mx.array | None:
    """(Q, tokens in runs): later queries of a span see less of a window's old end."""
    lowest = _lowest_visible(span.start, window)
    last = _lowest_visible(span.stop - 1, window)
    if last == lowest or lowest >= span.sealed:
        return None
    steps = np.minimum(np.arange(width), span.num_tokens - 1)
    bounds = np.array([_lowest_visible(span.start + int(i), window) for i in steps])
    keys = np.arange(lowest, span.sealed)
    return mx.array(np.where(keys[None] >= bounds[:, None], 0.0, HIDDEN).astype(np.float32))


def _tail_mask(
    positions: np.ndarray, sealed: np.ndarray, window: int | None, ring: int
) -> np.ndarray:
    """(B, 1, Q, R) additive: ring slot j holds the one position p >= sealed with p % R == j."""
    slots = np.arange(ring, dtype=np.int32)[None]
    held = sealed[:, None] + (slots - sealed[:, None]) % ring  # (B, R)
    visible = held[:, None] <= positions[:, :, None]  # (B, Q, R)
    if window is not None:
        visible &= held[:, None] > positions[:, :, None] - window
    return np.where(visible, np.float32(0.0), np.float32(HIDDEN))[:, None]


def _plan_long(span: Span, group: int, window: int | None) -> LongPlan:
    assert span.start == span.sealed, "a prefill chunk starts at a page boundary"
    lowest = _lowest_visible(span.start, window)
    return LongPlan(
        row=span.row,
        num_tokens=span.num_tokens,
        writes=span.tables[group].runs(span.start, span.stop),
        reads=span.tables[group].runs(lowest, span.stop),
        blocks=_query_blocks(span, lowest, window),
    )


def _query_blocks(
    span: Span, lowest: int, window: int | None
) -> list[tuple[int, int, int, int, mx.array | str | None]]:
    """Blocks of queries with the keys that they can see, so that no score matrix is larger."""
    blocks: list[tuple[int, int, int, int, mx.array | str | None]] = []
    width = span.num_tokens if mx.metal.is_available() and window is None else QUERY_BLOCK
    for first in range(0, span.num_tokens, width):
        last = min(first + width, span.num_tokens)
        start, stop = span.start + first, span.start + last
        key_start = _lowest_visible(start, window)
        mask: mx.array | str = "causal"
        if window is not None and key_start < _lowest_visible(stop - 1, window):
            positions, keys = np.arange(start, stop)[:, None], np.arange(key_start, stop)[None]
            mask = mx.array((keys <= positions) & (keys > positions - window))
        blocks.append((first, last, key_start - lowest, stop - lowest, mask))
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
        self._write(keys, values)
        parts = [self._short(plan, queries, scale, sinks) for plan in self._plan.short]
        parts += [self._long(plan, queries, scale, sinks) for plan in self._plan.long]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _write(self, keys: mx.array, values: mx.array) -> None:
        plan, pool = self._plan, self._pool
        for long in plan.long:
            pool.write_pages(long.writes, long.row, keys, values)
        if plan.tail_place is not None:
            if plan.tail_rows is not None:
                keys, values = keys[plan.tail_rows], values[plan.tail_rows]
            pool.write_tails(*plan.tail_place, keys, values)

    def _short(
        self, plan: ShortPlan, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        pool = self._pool
        num_seqs, width = plan.shape
        outputs = paged_attention(
            queries[plan.rows].reshape(num_seqs, width, *queries.shape[1:]),
            pool.keys,
            pool.values,
            plan.runs,
            plan.run_masks,
            pool.tail_keys[plan.slots],
            pool.tail_values[plan.slots],
            plan.tail_mask.astype(queries.dtype),
            scale=scale,
            sinks=sinks,
        )
        flat = outputs.reshape(num_seqs * width, *outputs.shape[2:])  # (B * Q, heads, D)
        return flat if plan.unpad is None else flat[plan.unpad]

    def _long(
        self, plan: LongPlan, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        keys, values = self._pool.view(plan.reads)  # (H, N, D)
        chunk = queries[plan.row : plan.row + plan.num_tokens].swapaxes(0, 1)  # (heads, n, D)
        outputs = [
            mx.fast.scaled_dot_product_attention(
                chunk[None, :, first:last],
                keys[None, :, key_start:key_stop],
                values[None, :, key_start:key_stop],
                scale=scale,
                mask=mask,
                sinks=sinks,
            )
            for first, last, key_start, key_stop, mask in plan.blocks
        ]
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return joined[0].swapaxes(0, 1)  # (n, heads, D)
