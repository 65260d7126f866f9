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
from .spans import Ints, ShortSpans

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
    step, unpad = short.lasting("padding", lambda: _padding(short))  # (B, Q)
    runs, covers = _runs(short, group, reach, decodes)
    return RunPlan(
        rows=None
        if step.size == num_rows and unpad is None
        else _as_index((short.rows[:, None] + step).ravel()),
        shape=(len(short), short.width),
        unpad=unpad,
        slots=short.lasting("slots", lambda: _as_index(short.slots)),
        runs=runs,
        covers=covers,
        run_masks=_run_masks(short, step, reach),
        tail_mask=mx.array(
            _tail_mask(short.starts[:, None] + step, short.sealed, reach, page_size)
        ),
    )


def _padding(short: ShortSpans) -> tuple[Ints, mx.array | None]:
    """(B, Q) which token of its span stands where, its last one repeated; and how to undo that."""
    step = np.minimum(np.arange(short.width, dtype=np.int32), short.counts[:, None] - 1)
    real = np.arange(short.width) < short.counts[:, None]  # (B, Q)
    return step, None if real.all() else mx.array(np.flatnonzero(real))


Runs = list[list[tuple[int, int]]]  # of each span


def _runs(
    short: ShortSpans, group: int, reach: Reach, decodes: bool
) -> tuple[Runs, list[tuple[int, int]]]:
    """What each span sees in pages, and the ranges to decode for it."""

    def work_out() -> tuple[Runs, list[tuple[int, int]]]:
        runs = _visible_runs(short, group, reach)
        if not decodes:
            return runs, []
        runs = [split_long(some, COVER_TOKENS) for some in runs]
        return runs, cover(runs, gap=COVER_GAP, most=COVER_TOKENS)

    return short.lasting(("runs", group), work_out) if reach.window is None else work_out()


def _as_index(rows: Ints) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


def _visible_runs(short: ShortSpans, group: int, reach: Reach) -> Runs:
    """For each span the pool slots of the sealed positions that it sees."""
    tables, sealed = [some[group] for some in short.tables], short.sealed.tolist()
    if reach.window is None:
        return [table.runs_before(stop) for table, stop in zip(tables, sealed, strict=True)]
    return [
        [run for part in reach.ranges(start, stop) for run in table.runs(*part)]
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


def _run_masks(short: ShortSpans, step: Ints, reach: Reach) -> list[mx.array | None]:
    """Additive (Q, tokens in runs): later queries of a span see less of a window's old end."""
    if reach.window is None or short.width == 1:
        return [None] * len(short)
    masks: list[mx.array | None] = []
    places = zip(short.starts.tolist(), short.sealed.tolist(), step, strict=True)
    for start, sealed, steps in places:
        ranges = reach.ranges(start, sealed)
        keys = np.concatenate(
            [np.arange(*part, dtype=np.int32) for part in ranges] or [step[0, :0]]
        )
        seen = reach.sees(start + steps[:, None], keys[None])
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
