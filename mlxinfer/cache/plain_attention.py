"""Short segments attend in plain MLX: gathered together, or one by one over runs of pages.

B = segments, Q = tokens of each (padded), R = 2 * page_size, the ring of a tail.

Gathering copies the pages of many segments into one padded array and attends with a handful of
operations for all of them. Views of runs of consecutive pages copy nothing, and take a handful of
operations for each segment; scores over a few runs, joined before the softmax, cost what scores
over one contiguous cache cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.attention_plan import Numbers, joined
from ..metal_kernels.paged_attention import gathered_attention, paged_attention
from .groups import AttentionWindow
from .inputs import Ints, Segments
from .pool import PagePool, Views
from .step import Part

HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen


@dataclass(frozen=True, slots=True)
class ShortQueries:
    """The queries of B short segments and their tails."""

    rows: mx.array | slice | None  # (B * Q,) flat rows of the queries; None: all of them
    shape: tuple[int, int]  # (B, Q)
    unpad: mx.array | None  # (T',) from the padded (B * Q) outputs back to flat order
    slots: mx.array | slice  # (B,) tails
    tail_mask: mx.array  # (B, 1, Q, R)

    def take(self, queries: mx.array) -> mx.array:
        """(T, heads, D) -> (B, Q, heads, D)."""
        own = queries if self.rows is None else queries[self.rows]
        return own.reshape(*self.shape, *queries.shape[1:])

    def flat(self, outputs: mx.array) -> mx.array:
        """(B, Q, heads, D) -> (T', heads * D)."""
        flat = outputs.reshape(self.shape[0] * self.shape[1], -1)
        return flat if self.unpad is None else flat[self.unpad]


def plan_queries(
    short: Segments, window: AttentionWindow, page_size: int, num_rows: int
) -> tuple[ShortQueries, Ints]:
    """The queries of some segments of a step of `num_rows` tokens, and their positions (B, Q)."""
    step, unpad = short.memoised("padding", lambda: _padding(short))
    positions = short.starts[:, None] + step
    everything = step.size == num_rows and unpad is None
    queries = ShortQueries(
        rows=None if everything else short.memoised("rows", lambda: _rows(short, step)),
        shape=(len(short), short.width),
        unpad=unpad,
        slots=short.memoised("slots", lambda: _as_index(short.slots)),
        tail_mask=_tail_mask(short, positions, window, page_size),
    )
    return queries, positions


def _padding(short: Segments) -> tuple[Ints, mx.array | None]:
    """(B, Q) the token of its segment at each place, the last one repeated; and how to undo it."""
    step = np.minimum(np.arange(short.width, dtype=np.int32), short.counts[:, None] - 1)
    real = np.arange(short.width) < short.counts[:, None]  # (B, Q)
    return step, None if real.all() else mx.array(np.flatnonzero(real))


def _rows(short: Segments, step: Ints) -> mx.array | slice:
    return _as_index((short.rows[:, None] + step).ravel())


def _as_index(rows: Ints) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


def _tail_mask(
    short: Segments, positions: Ints, window: AttentionWindow, page_size: int
) -> mx.array:
    """(B, 1, Q, R) additive: ring slot j holds the one position p >= sealed with p % R == j."""
    ring, sealed = 2 * page_size, short.sealed[:, None]
    if window.size is None or window.size >= ring:  # a token sees all of the tail before it
        begins = short.memoised(  # rows of the masks, but for the positions
            "tail masks", lambda: (sealed // page_size % 2 * ring - sealed)[:, None]
        )
        return _ring_masks(page_size)[mx.array(positions[:, None] + begins)]
    slots = np.arange(ring, dtype=np.int32)[None]
    held = sealed + (slots - sealed) % ring  # (B, R)
    return mx.array(additive(window.sees(positions[:, :, None], held[:, None]))[:, None])


@cache
def _ring_masks(page_size: int) -> mx.array:
    """(2 * R, R) additive: row h * R + t for the t-th token of a tail that begins in half h."""
    begins = page_size * np.arange(2)[:, None, None]
    places = np.arange(2 * page_size)
    seen = (places - begins) % (2 * page_size) <= places[:, None]
    return mx.array(additive(seen).reshape(-1, 2 * page_size))


def additive(visible: NDArray[np.bool_]) -> NDArray[np.float32]:
    """0 where something is visible, else as low as can be."""
    return np.where(visible, np.float32(0.0), np.float32(HIDDEN))


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """B segments that see n pages each, padded."""

    queries: ShortQueries
    page_ids: mx.array  # (B, n)
    mask: mx.array | None  # (B, 1, 1 or Q, n * page_size) additive; None: all is seen

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
        own = self.queries.take(queries)
        ids = mx.depends([self.page_ids], [own])[0]  # else all layers might gather first
        outputs = gathered_attention(
            own,
            pool.keys.read_pages(ids, pool.page_size).transpose(1, 0, 3, 2),
            pool.values.read_pages(ids, pool.page_size).swapaxes(0, 1),
            self.mask,
            *pool.read_tails(self.queries.slots),
            self.queries.tail_mask,
            scale=scale,
            sinks=sinks,
            soft_cap=soft_cap,
        )
        return self.queries.flat(outputs)


def plan_gather(
    short: Segments, group: int, window: AttentionWindow, page_size: int, num_rows: int
) -> GatherPlan:
    """Plan segments of one step, each of which sees a page at least."""
    queries, positions = plan_queries(short, window, page_size, num_rows)
    if window.size is None:
        ids, mask = short.memoised(("gather", group), lambda: _all_pages(short, group, page_size))
    else:
        ids, mask = _window_pages(short, group, window, page_size, positions)
    return GatherPlan(queries, ids, mask)


def num_visible(short: Segments, window: AttentionWindow, page_size: int) -> Ints:
    """(B,) sealed pages of which each segment sees anything."""
    pages = short.sealed // page_size
    if window.size is None:
        return pages
    first = np.maximum(short.starts - window.size + 1, 0) // page_size
    kept = np.minimum(window.kept_pages(page_size), first)
    return np.minimum(kept, pages) + np.maximum(pages - first, 0)


def _all_pages(short: Segments, group: int, page_size: int) -> tuple[mx.array, mx.array | None]:
    """Ids (B, n) of all sealed pages, and the mask (B, 1, 1, n * page_size) of the padding."""
    ids, real = _padded(short.sealed_pages(group))
    if real.all():
        return mx.array(ids), None
    mask = np.repeat(additive(real), page_size, axis=1)
    return mx.array(ids), mx.array(mask[:, None, None])


def _window_pages(
    short: Segments, group: int, window: AttentionWindow, page_size: int, positions: Ints
) -> tuple[mx.array, mx.array]:
    """Ids (B, n) of the pages that anything is seen of, and the mask (B, 1, Q, n * page_size)."""
    tables, numbers = [], []
    for row, start, sealed in zip(
        short.tables, short.starts.tolist(), short.sealed.tolist(), strict=True
    ):
        first = window.first_page(start, page_size)
        stop = sealed // page_size
        kept = np.arange(min(window.kept_pages(page_size), first, stop), dtype=np.int32)
        seen = np.concatenate([kept, np.arange(first, stop, dtype=np.int32)])
        numbers.append(seen)
        tables.append(np.asarray(row[group].numbers_before(sealed))[seen])
    ids, real = _padded(tables)
    keys = _padded(numbers)[0][:, :, None] * page_size + np.arange(page_size)  # (B, n, P)
    visible = window.sees(positions[:, :, None], keys.reshape(len(short), 1, -1))
    visible &= np.repeat(real, page_size, axis=1)[:, None]
    return mx.array(ids), mx.array(additive(visible)[:, None])


def _padded(rows: Sequence[Numbers]) -> tuple[Ints, NDArray[np.bool_]]:
    """(B, n) rows, each padded with its own last entry, and which entries are real.

    Its own: what another sequence has computed must not reach this one, not even times zero.
    """
    entries, lengths = joined(rows)
    assert lengths.all()
    first = np.cumsum(lengths) - lengths
    places = np.arange(lengths.max())
    last = lengths[:, None] - 1
    return entries[first[:, None] + np.minimum(places, last)], places <= last


COVER_GAP = 64  # tokens decoded without need, at most, to decode those around them in one go
COVER_TOKENS = 2048  # decoded together: what a layer takes for a moment stays small


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Segments of at most 8 tokens that attend together."""

    queries: ShortQueries
    views: Views
    run_masks: list[mx.array | None]

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
        own = self.queries.take(queries)
        several = len(self.views.covers) > 1
        # Else MLX may decode the first ranges of all layers before it computes the first layer.
        keys = pool.keys.read_each(self.views, after=own if several else None, transposed=True)
        last = keys[-1][-1] if several and keys[-1] else None
        values = pool.values.read_each(self.views, after=last)
        outputs = paged_attention(
            own,
            keys,
            values,
            self.run_masks,
            *pool.read_tails(self.queries.slots),
            self.queries.tail_mask,
            scale=scale,
            sinks=sinks,
            soft_cap=soft_cap,
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


SPAN_BYTES = (
    1 << 19
)  # gathered for one segment and layer, at most: operations of its own cost as much
STEP_BYTES = 1 << 25  # gathered for a layer, at most: what a step takes for a moment stays small


class PlainPlanner:
    """Plans the short segments of a layer group.

    Args:
        group: the layer group.
        window: what its layers keep.
        page_size: tokens a page.
        token_bytes: of keys and values of one layer, as they are attended to.
        decodes: a layer of it stores something else than vectors.
    """

    def __init__(
        self,
        group: int,
        window: AttentionWindow,
        page_size: int,
        *,
        token_bytes: int,
        decodes: bool,
    ) -> None:
        self._group = group
        self._window = window
        self._page_size = page_size
        self._page_bytes = token_bytes * page_size
        self._decodes = decodes

    def __call__(self, segments: Segments, num_rows: int) -> Sequence[Part]:
        """Some segments of a step of `num_rows` tokens in parts: their flat rows and their plan."""
        if self._window.size is None:  # what is seen of pages is what is sealed
            few = segments.memoised(("few", self._group), lambda: self._few(segments))
        else:
            few = self._few(segments)
        num_few = np.count_nonzero(few)
        if num_few < 2:
            return [self._alone(segments, num_rows)]
        if num_few == len(segments):
            return [self._together(segments, num_rows)]
        short, long = self._parts(segments, few)
        return [self._together(short, num_rows), self._alone(long, num_rows)]

    def _few(self, segments: Segments) -> NDArray[np.bool_]:
        """(B,) which segments see something, and little enough to be gathered."""
        pages = num_visible(segments, self._window, self._page_size)
        most = min(SPAN_BYTES, STEP_BYTES // len(segments)) // self._page_bytes
        few: NDArray[np.bool_] = (pages > 0) & (pages <= most)
        return few

    def _parts(self, segments: Segments, few: NDArray[np.bool_]) -> tuple[Segments, Segments]:
        """Those that are gathered, and the others."""
        short, long = segments.memoised(
            ("parts", few.tobytes()),
            lambda: (segments.some(np.flatnonzero(few)), segments.some(np.flatnonzero(~few))),
        )
        return short.at(segments.starts[few]), long.at(segments.starts[~few])

    def _together(self, segments: Segments, num_rows: int) -> Part:
        plan = plan_gather(segments, self._group, self._window, self._page_size, num_rows)
        return segments.tokens()[0], plan

    def _alone(self, segments: Segments, num_rows: int) -> Part:
        plan = plan_runs(
            segments, self._group, self._window, self._page_size, num_rows, self._decodes
        )
        return segments.tokens()[0], plan
