"""One step of the KV cache worked out ahead: who writes where, who sees what. Knows no arrays of K.

Once per step and layer group (`GroupPlan`), for all layers of the group. Short segments (decode,
verification) come first in the flat list of tokens and go to tails; long ones (prefill chunks) go
to pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .pages import PageTable
from .pool import TailPlace, tail_place
from .reach import Reach

Ints = NDArray[np.int32]

HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen
COVER_GAP = 64  # tokens decoded for nobody, at most, to decode those around them in one go
COVER_TOKENS = 2048  # decoded together: what a layer takes for a moment stays small
QUERY_BLOCK = 128  # prefill queries at a time where attention materialises its scores,
MIN_QUERY_BLOCK = 16
MAX_SCORES = 1 << 19  # fewer where keys are many: as many scores a head at once


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
    covers: list[tuple[int, int]]  # ranges that hold all runs, where they must be decoded
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


@dataclass(frozen=True, slots=True)
class ShortSpans:
    """B short spans that attend together, as arrays: worked out once for all layer groups."""

    spans: list[Span]
    rows: Ints  # (B,) of the first tokens in the flat list
    starts: Ints  # (B,) their positions
    counts: Ints  # (B,)
    sealed: Ints  # (B,)
    slots: Ints  # (B,)

    @staticmethod
    def of(spans: list[Span]) -> "ShortSpans":
        """Read the spans."""
        return ShortSpans(
            spans,
            _ints([span.row for span in spans]),
            _ints([span.start for span in spans]),
            _ints([span.num_tokens for span in spans]),
            _ints([span.sealed for span in spans]),
            _ints([span.slot for span in spans]),
        )

    def tokens(self) -> tuple[Ints, Ints, Ints]:
        """Flat rows, slots and positions (N,) of all tokens."""
        if self.counts.max() == 1:
            return self.rows, self.slots, self.starts
        step = np.concatenate([np.arange(count, dtype=np.int32) for count in self.counts])
        rows, slots, starts = (
            np.repeat(part, self.counts) for part in (self.rows, self.slots, self.starts)
        )
        return rows + step, slots, starts + step


def by_width(short: Sequence[Span]) -> list[ShortSpans]:
    """Single tokens together, and the few wider spans together: padding stays small."""
    single = [span for span in short if span.num_tokens == 1]
    wide = [span for span in short if span.num_tokens > 1] if len(single) < len(short) else []
    return [ShortSpans.of(spans) for spans in (single, wide) if spans]


def plan_group(
    short: Sequence[ShortSpans],
    long: Sequence[Span],
    *,
    group: int,
    reach: Reach,
    page_size: int,
    decodes: bool = False,
) -> GroupPlan:
    """Plan one step of layer group `group`, which has layers to decode or not."""
    ring = 2 * page_size
    rows, slots, positions = _tail_writes(short, long, page_size)
    num_rows = sum([int(spans.counts.sum()) for spans in short])
    num_rows += sum([span.num_tokens for span in long])
    return GroupPlan(
        short=[_plan_short(spans, group, reach, page_size, num_rows, decodes) for spans in short],
        long=[_plan_long(span, group, reach) for span in long],
        tail_rows=None if len(rows) == num_rows else mx.array(rows),
        tail_place=tail_place(slots, positions % ring) if len(rows) else None,
    )


def _tail_writes(
    short: Sequence[ShortSpans], long: Sequence[Span], page_size: int
) -> tuple[Ints, Ints, Ints]:
    """Flat rows, slots and positions (N,) of the tokens that go to tails.

    Of a prefill chunk that is what its last, not yet full page holds.
    """
    parts = [spans.tokens() for spans in short]
    for s in long:
        rest = min(s.stop % page_size, s.num_tokens)  # what came before is in the tail already
        step = np.arange(-rest, 0, dtype=np.int32)
        parts.append((s.row + s.num_tokens + step, np.full_like(step, s.slot), s.stop + step))
    if len(parts) == 1:
        return parts[0]
    rows, slots, positions = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(slots), np.concatenate(positions)


def _plan_short(
    short: ShortSpans, group: int, reach: Reach, page_size: int, num_rows: int, decodes: bool
) -> ShortPlan:
    width = int(short.counts.max())
    step = np.minimum(np.arange(width, dtype=np.int32), short.counts[:, None] - 1)  # (B, Q)
    real = np.arange(width) < short.counts[:, None]  # (B, Q)
    padded = not real.all()
    positions = short.starts[:, None] + step  # (B, Q)
    runs = _visible_runs(short.spans, group, reach)
    if decodes:
        runs = [split_long(some, COVER_TOKENS) for some in runs]
    return ShortPlan(
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


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)


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
    num_keys = sum([stop - start for start, stop in ranges])
    fitting = max(MIN_QUERY_BLOCK, min(QUERY_BLOCK, MAX_SCORES // num_keys))
    width = span.num_tokens if whole else fitting
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
