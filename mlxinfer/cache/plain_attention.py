"""Short segments attend in plain MLX: gathered together, or one by one over runs of pages.

B = segments, Q = tokens of each (padded), R = 2 * page_size, the ring of a tail.

Gathering copies the pages of many segments into one padded array and attends with a handful of
operations for all of them. Views of runs of consecutive pages copy nothing, and take a handful of
operations for each segment; scores over a few runs, joined before the softmax, cost what scores
over one contiguous cache cost.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.attention_plan import Numbers, joined
from ..metal_kernels.paged_attention import Softmax, gathered_attention, paged_attention
from .groups import AttentionWindow
from .inputs import Ints, Segments
from .pool import PagePool, Views, views_of
from .step import Part

KeysValues = tuple[mx.array, mx.array]
HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen


@dataclass(frozen=True, slots=True)
class ShortQueries:
    """Where the queries of B short segments and their tails are, whatever their positions."""

    shape: tuple[int, int]  # (B, Q)
    step: Ints  # (B, Q) the token of its segment at each place; the last one is repeated
    rows: mx.array | slice  # (B * Q,) flat rows of the queries
    unpad: mx.array | None  # (T',) from the padded (B * Q) outputs back to flat order
    slots: mx.array | slice  # (B,) tails
    tail_begins: Ints  # (B, 1, 1) rows of `_ring_masks`, less the positions


def short_queries(short: Segments, page_size: int) -> ShortQueries:
    """The queries of some segments."""
    ring, sealed = 2 * page_size, short.sealed[:, None]
    step = np.minimum(np.arange(short.width, dtype=np.int32), short.counts[:, None] - 1)
    real = np.arange(short.width) < short.counts[:, None]  # (B, Q)
    return ShortQueries(
        shape=(len(short), short.width),
        step=step,
        rows=_as_index((short.rows[:, None] + step).ravel()),
        unpad=None if real.all() else mx.array(np.flatnonzero(real)),
        slots=_as_index(short.slots),
        tail_begins=(sealed // page_size % 2 * ring - sealed)[:, None],
    )


def _as_index(rows: Ints) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


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
class PlainPlan(ABC):
    """B short segments that attend together over pages and tails.

    Attributes:
        whole: the queries are all rows of the step, in order.
        tail_mask: (B, 1, Q, R) additive.
    """

    queries: ShortQueries
    whole: bool
    tail_mask: mx.array

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        shape, unpad = self.queries.shape, self.queries.unpad
        own = queries if self.whole else queries[self.queries.rows]
        outputs = self._attend(  # (B, Q, heads, V)
            pool,
            own.reshape(*shape, *queries.shape[1:]),
            pool.read_tails(self.queries.slots),
            softmax,
        )
        flat = outputs.reshape(shape[0] * shape[1], -1)
        return flat if unpad is None else flat[unpad]

    @abstractmethod
    def _attend(
        self, pool: PagePool, queries: mx.array, tails: KeysValues, softmax: Softmax
    ) -> mx.array:
        """Queries (B, Q, heads, D) -> what they see of pages and `tails`, (B, Q, heads, V)."""


@dataclass(frozen=True, slots=True)
class GatherPlan(PlainPlan):
    """Each segment sees n pages, padded, which are gathered into one array."""

    page_ids: mx.array  # (B, n)
    mask: mx.array | None  # (B, 1, 1 or Q, n * page_size) additive; None: all is seen

    def _attend(
        self, pool: PagePool, queries: mx.array, tails: KeysValues, softmax: Softmax
    ) -> mx.array:
        ids = mx.depends([self.page_ids], [queries])[0]  # else all layers might gather first
        keys = pool.keys.read_pages(ids, pool.page_size).transpose(1, 0, 3, 2)
        values = pool.values.read_pages(ids, pool.page_size).swapaxes(0, 1)
        return gathered_attention(
            queries, keys, values, self.mask, *tails, self.tail_mask, **softmax._asdict()
        )


def num_visible(short: Segments, window: AttentionWindow, page_size: int) -> Ints:
    """(B,) sealed pages of which each segment sees anything."""
    pages = short.sealed // page_size
    if window.size is None:
        return pages
    first = window.lowest_of(short.starts) // page_size
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
class RunPlan(PlainPlan):
    """Each segment sees runs of consecutive pages, as views."""

    views: Views
    run_masks: list[mx.array | None]

    def _attend(
        self, pool: PagePool, queries: mx.array, tails: KeysValues, softmax: Softmax
    ) -> mx.array:
        several = len(self.views.covers) > 1
        # Else MLX may decode the first ranges of all layers before it computes the first layer.
        after = queries if several else None
        keys = pool.keys.read_each(self.views, after, transposed=True)
        last = keys[-1][-1] if several and keys[-1] else None
        values = pool.values.read_each(self.views, last)
        return paged_attention(
            queries, keys, values, self.run_masks, *tails, self.tail_mask, **softmax._asdict()
        )


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
        """Gather the pages of segments, each of which sees a page at least."""
        positions, common = self._common(segments, num_rows)
        window, size, group = self._window, self._page_size, self._group
        if window.size is None:
            ids, mask = segments.memoised(
                ("gather", group), lambda: _all_pages(segments, group, size)
            )
        else:
            ids, mask = _window_pages(segments, group, window, size, positions)
        return segments.tokens()[0], GatherPlan(*common, ids, mask)

    def _alone(self, segments: Segments, num_rows: int) -> Part:
        """Let segments attend over runs of pages."""
        positions, common = self._common(segments, num_rows)
        if self._window.size is None:
            views = segments.memoised(("runs", self._group), lambda: self._views(segments))
        else:
            views = self._views(segments)
        plan = RunPlan(*common, views, _run_masks(segments, positions, self._window))
        return segments.tokens()[0], plan

    def _views(self, segments: Segments) -> Views:
        """What each segment sees in pages, and the ranges to decode for it."""
        runs = self._visible_runs(segments)
        if not self._decodes:
            return views_of(runs, [])
        runs = [split_long(some, COVER_TOKENS) for some in runs]
        return views_of(runs, cover(runs, gap=COVER_GAP, most=COVER_TOKENS))

    def _visible_runs(self, segments: Segments) -> list[list[tuple[int, int]]]:
        """For each segment the pool slots of the sealed positions that it sees."""
        tables = [some[self._group] for some in segments.tables]
        sealed, window = segments.sealed.tolist(), self._window
        if window.size is None:
            return [table.runs_before(stop) for table, stop in zip(tables, sealed, strict=True)]
        return [
            [run for part in window.ranges(start, stop) for run in table.runs(*part)]
            for table, start, stop in zip(tables, segments.starts.tolist(), sealed, strict=True)
        ]

    def _common(
        self, segments: Segments, num_rows: int
    ) -> tuple[Ints, tuple[ShortQueries, bool, mx.array]]:
        """Positions (B, Q) of the queries, and the fields of their `PlainPlan`."""
        size, window = self._page_size, self._window
        queries = segments.memoised("queries", lambda: short_queries(segments, size))
        positions = segments.starts[:, None] + queries.step
        whole = positions.size == num_rows and queries.unpad is None
        # Ring slot j holds the one position p >= sealed with p % R == j.
        # A token sees all of the tail before it, or not.
        if window.size is None or (window.size >= 2 * size and not window.chunked):
            mask = _ring_masks(size)[mx.array(positions[:, None] + queries.tail_begins)]
        else:
            sealed, slots = segments.sealed[:, None], np.arange(2 * size, dtype=np.int32)
            held = sealed + (slots - sealed) % (2 * size)  # (B, R)
            mask = mx.array(additive(window.sees(positions[..., None], held[:, None]))[:, None])
        return positions, (queries, whole, mask)
