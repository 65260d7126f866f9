"""Short spans attend in plain MLX: over views of runs of pages, and over tails. Knows no queue.

Scores of a few runs, joined before the softmax, cost what scores of one contiguous cache cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.paged_attention import paged_attention
from .pool import LayerPool
from .reach import Reach
from .spans import Ints, ShortSpans, Span

HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen
COVER_GAP = 64  # tokens decoded for nobody, at most, to decode those around them in one go
COVER_TOKENS = 2048  # decoded together: what a layer takes for a moment stays small


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Spans of at most 8 tokens that attend together. B spans, Q tokens each (padded)."""

    rows: mx.array | slice | None  # (B * Q,) flat rows of the queries; None: all of them
    shape: tuple[int, int]  # (B, Q)
    unpad: mx.array | None  # (T',) from the padded (B * Q) outputs back to flat order
    slots: mx.array | slice  # (B,) tails
    runs: list[list[tuple[int, int]]]
    covers: list[tuple[int, int]]  # ranges that hold all runs, where they must be decoded
    run_masks: list[mx.array | None]
    tail_mask: mx.array  # (B, 1, Q, R)

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these spans see, (T', heads, V)."""
        num_seqs, width = self.shape
        rows = queries if self.rows is None else queries[self.rows]
        several = len(self.covers) > 1
        # Else MLX may decode the first ranges of all layers before it computes the first layer.
        keys = pool.keys.read_each(
            self.runs, self.covers, after=rows if several else None, transposed=True
        )
        last = keys[-1][-1] if several and keys[-1] else None
        values = pool.values.read_each(self.runs, self.covers, after=last)
        outputs = paged_attention(
            rows.reshape(num_seqs, width, *queries.shape[1:]),
            [list(zip(*some, strict=True)) for some in zip(keys, values, strict=True)],
            self.run_masks,
            pool.keys.read_tails(self.slots),
            pool.values.read_tails(self.slots),
            self.tail_mask,
            scale=scale,
            sinks=sinks,
        )
        flat = outputs.reshape(num_seqs * width, *outputs.shape[2:])  # (B * Q, heads, V)
        return flat if self.unpad is None else flat[self.unpad]


def plan_runs(
    short: ShortSpans, group: int, reach: Reach, page_size: int, num_rows: int, decodes: bool
) -> RunPlan:
    """Plan spans of one step; `decodes`: a layer stores something else than vectors."""
    width = int(short.counts.max())
    step = np.minimum(np.arange(width, dtype=np.int32), short.counts[:, None] - 1)  # (B, Q)
    real = np.arange(width) < short.counts[:, None]  # (B, Q)
    padded = not real.all()
    positions = short.starts[:, None] + step  # (B, Q)
    runs = _visible_runs(short.spans, group, reach)
    if decodes:
        runs = [split_long(some, COVER_TOKENS) for some in runs]
    return RunPlan(
        rows=None
        if step.size == num_rows and not padded
        else _as_index((short.rows[:, None] + step).ravel()),
        shape=(len(short.spans), width),
        unpad=mx.array(np.flatnonzero(real)) if padded else None,
        slots=_as_index(short.slots),
        runs=runs,
        covers=cover(runs, gap=COVER_GAP, most=COVER_TOKENS) if decodes else [],
        run_masks=_run_masks(short.spans, step, reach),
        tail_mask=mx.array(_tail_mask(positions, short.sealed, reach, page_size)),
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


def _tail_mask(positions: Ints, sealed: Ints, reach: Reach, page_size: int) -> NDArray[np.float32]:
    """(B, 1, Q, R) additive: ring slot j holds the one position p >= sealed with p % R == j."""
    ring = 2 * page_size
    if reach.window is None or reach.window >= ring:  # a token sees all of the tail before it
        half = (sealed[:, None] // page_size) % 2
        return _ring_masks(page_size)[half, positions - sealed[:, None]][:, None]
    slots = np.arange(ring, dtype=np.int32)[None]
    held = sealed[:, None] + (slots - sealed[:, None]) % ring  # (B, R)
    return _additive(reach.sees(positions[:, :, None], held[:, None]))[:, None]


@cache
def _ring_masks(page_size: int) -> NDArray[np.float32]:
    """(2, R, R) additive, by the half in which a tail begins and a token's place in the tail."""
    begins = page_size * np.arange(2)[:, None, None]
    places = np.arange(2 * page_size)
    return _additive((places - begins) % (2 * page_size) <= places[:, None])


def _additive(visible: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(visible, np.float32(0.0), np.float32(HIDDEN))
