"""Short segments attend in plain MLX: over views of runs of pages, and over tails. Knows no queue.

Scores of a few runs, joined before the softmax, cost what scores of one contiguous cache cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..metal_kernels.paged_attention import paged_attention
from .plane import Views
from .pool import LayerPool
from .queries import ShortQueries, additive, plan_queries
from .segments import Ints, Segments
from .window import AttentionWindow

COVER_GAP = 64  # tokens decoded for nobody, at most, to decode those around them in one go
COVER_TOKENS = 2048  # decoded together: what a layer takes for a moment stays small


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Spans of at most 8 tokens that attend together. B segments, Q tokens each (padded)."""

    queries: ShortQueries
    views: Views
    run_masks: list[mx.array | None]

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        own = self.queries.take(queries)
        several = len(self.views.covers) > 1
        # Else MLX may decode the first ranges of all layers before it computes the first layer.
        keys = pool.keys.read_each(self.views, after=own if several else None, transposed=True)
        last = keys[-1][-1] if several and keys[-1] else None
        values = pool.values.read_each(self.views, after=last)
        outputs = paged_attention(
            own,
            [list(zip(*some, strict=True)) for some in zip(keys, values, strict=True)],
            self.run_masks,
            *self.queries.tails(pool),
            scale=scale,
            sinks=sinks,
        )
        return self.queries.flat(outputs)


def plan_runs(
    short: Segments,
    group: int,
    window: AttentionWindow,
    page_size: int,
    num_rows: int,
    decodes: bool,
) -> RunPlan:
    """Plan segments of one step; `decodes`: a layer stores something else than vectors."""
    queries, positions = plan_queries(short, window, page_size, num_rows)
    views = _views(short, group, window, decodes)
    return RunPlan(queries, views, _run_masks(short, positions, window))


def _views(short: Segments, group: int, window: AttentionWindow, decodes: bool) -> Views:
    """What each segment sees in pages, and the ranges to decode for it."""

    def work_out() -> Views:
        runs = _visible_runs(short, group, window)
        if not decodes:
            return Views.of(runs, [])
        runs = [split_long(some, COVER_TOKENS) for some in runs]
        return Views.of(runs, cover(runs, gap=COVER_GAP, most=COVER_TOKENS))

    return short.memoised(("runs", group), work_out) if window.size is None else work_out()


def _visible_runs(
    short: Segments, group: int, window: AttentionWindow
) -> list[list[tuple[int, int]]]:
    """For each segment the pool slots of the sealed positions that it sees."""
    tables, sealed = [some[group] for some in short.tables], short.sealed.tolist()
    if window.size is None:
        return [table.runs_before(stop) for table, stop in zip(tables, sealed, strict=True)]
    return [
        [run for part in window.ranges(start, stop) for run in table.runs(*part)]
        for table, start, stop in zip(tables, short.starts.tolist(), sealed, strict=True)
    ]


def split_long(runs: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The same slots in runs of at most `most` tokens."""
    return [
        (begin, min(begin + most, stop))
        for start, stop in runs
        for begin in range(start, stop, most)
    ]


def cover(
    runs: Sequence[Sequence[tuple[int, int]]], *, gap: int, most: int
) -> list[tuple[int, int]]:
    """Few ranges in order that hold every run, each run in one: what is decoded together.

    Runs are joined where no more than `gap` tokens lie between, up to `most` tokens together.
    """
    covers: list[tuple[int, int]] = []
    for start, stop in sorted([run for some in runs for run in some]):
        begin, end = covers[-1] if covers else (start, start)
        joined = max(end, stop)
        if covers and stop <= end:
            continue
        if covers and start - end <= gap and joined - begin <= most:
            covers[-1] = begin, joined
        else:
            covers.append((start, stop))
    return covers


def _run_masks(short: Segments, positions: Ints, window: AttentionWindow) -> list[mx.array | None]:
    """Additive (Q, tokens in runs): later queries of a segment see less of a window's old end."""
    if window.size is None or short.width == 1:
        return [None] * len(short)
    masks: list[mx.array | None] = []
    for own, sealed in zip(positions, short.sealed.tolist(), strict=True):
        ranges = window.ranges(int(own[0]), sealed)
        keys = np.concatenate([np.arange(*part, dtype=np.int32) for part in ranges] or [own[:0]])
        seen = window.sees(own[:, None], keys[None])
        masks.append(mx.array(additive(seen)) if len(keys) else None)
    return masks
