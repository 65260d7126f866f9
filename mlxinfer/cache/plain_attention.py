"""Short segments attend in plain MLX: their pages are gathered into one padded array.

B = segments, Q = tokens of each (padded), R = 2 * page_size, the ring of a tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.attention_plan import Numbers, joined
from ..metal_kernels.paged_attention import Softmax, gathered_attention
from .groups import AttentionWindow
from .inputs import Ints, Segments
from .pool import PagePool
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
class GatherPlan:
    """B short segments that attend together over gathered pages and tails.

    Attributes:
        queries: where the queries are.
        whole: the queries are all rows of the step, in order.
        tail_mask: (B, 1, Q, R) additive.
        page_ids: (B, n) of the pages that are gathered; None: no segment sees any.
        mask: (B, 1, 1 or Q, n * page_size) additive; None: all of the pages is seen.
    """

    queries: ShortQueries
    whole: bool
    tail_mask: mx.array
    page_ids: mx.array | None
    mask: mx.array | None

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        shape, unpad = self.queries.shape, self.queries.unpad
        own = queries if self.whole else queries[self.queries.rows]
        outputs = gathered_attention(  # (B, Q, heads, V)
            own.reshape(*shape, *queries.shape[1:]),
            self._pages(pool, own),
            self.mask,
            *pool.read_tails(self.queries.slots),
            self.tail_mask,
            **softmax._asdict(),
        )
        flat = outputs.reshape(shape[0] * shape[1], -1)
        return flat if unpad is None else flat[unpad]

    def _pages(self, pool: PagePool, queries: mx.array) -> KeysValues | None:
        """Keys (B, H, D, N) and values (B, H, N, V) of the pages."""
        if self.page_ids is None:
            return None
        ids = mx.depends([self.page_ids], [queries])[0]  # else all layers might gather first
        keys = pool.keys.read_pages(ids, pool.page_size).transpose(1, 0, 3, 2)
        return keys, pool.values.read_pages(ids, pool.page_size).swapaxes(0, 1)


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


BLOCK_BYTES = 1 << 25  # gathered together for a layer, where more than one segment is


def gather_blocks(num_pages: Ints, most: int) -> list[NDArray[np.int64]]:
    """Which of B segments are gathered together: places among the B, in order.

    Those of like length are together, since shorter ones are padded. Segments that see no page
    have a block of their own: there is nothing to pad them with.

    Args:
        num_pages: (B,) that each segment sees.
        most: pages of a block, padding included, unless it is one segment.
    """
    if num_pages.min() > 0 and num_pages.max() * len(num_pages) <= most:  # most steps
        return [np.arange(len(num_pages))]
    order = np.argsort(num_pages, kind="stable")
    blocks: list[list[int]] = []
    shortest = 0
    for place, count in zip(order.tolist(), num_pages[order].tolist(), strict=True):
        together = blocks and (not count or (shortest and (len(blocks[-1]) + 1) * count <= most))
        if together:
            blocks[-1].append(place)
        else:
            blocks.append([place])
            shortest = count
    return [np.array(sorted(block)) for block in blocks]


class PlainPlanner:
    """Plans the short segments of a layer group.

    Args:
        group: the layer group.
        window: what its layers keep.
        page_size: tokens a page.
        token_bytes: of keys and values of one layer, as they are attended to.
    """

    def __init__(
        self, group: int, window: AttentionWindow, page_size: int, *, token_bytes: int
    ) -> None:
        self._group = group
        self._window = window
        self._page_size = page_size
        self._page_bytes = token_bytes * page_size

    def __call__(self, segments: Segments, num_rows: int) -> Sequence[Part]:
        """Some segments of a step of `num_rows` tokens in parts: their flat rows and their plan."""
        if self._window.size is None:  # what is seen of pages is what is sealed
            blocks = segments.memoised(("blocks", self._group), lambda: self._blocks(segments))
        else:
            blocks = self._blocks(segments)
        if len(blocks) == 1:
            return [self._together(segments, num_rows)]
        parts = segments.memoised(
            ("parts", *[block.tobytes() for block in blocks]),
            lambda: [segments.some(block) for block in blocks],
        )
        return [
            self._together(some.at(segments.starts[block]), num_rows)
            for some, block in zip(parts, blocks, strict=True)
        ]

    def _blocks(self, segments: Segments) -> list[NDArray[np.int64]]:
        """Which of the segments are gathered together."""
        pages = num_visible(segments, self._window, self._page_size)
        return gather_blocks(pages, BLOCK_BYTES // self._page_bytes)

    def _together(self, segments: Segments, num_rows: int) -> Part:
        """Gather the pages of segments: each sees a page at least, or none does."""
        positions, common = self._common(segments, num_rows)
        window, size, group = self._window, self._page_size, self._group
        ids: mx.array | None = None
        mask: mx.array | None = None
        if window.size is not None and num_visible(segments, window, size).any():
            ids, mask = _window_pages(segments, group, window, size, positions)
        elif window.size is None and segments.sealed.any():
            ids, mask = segments.memoised(
                ("gather", group), lambda: _all_pages(segments, group, size)
            )
        return segments.tokens()[0], GatherPlan(*common, ids, mask)

    def _common(
        self, segments: Segments, num_rows: int
    ) -> tuple[Ints, tuple[ShortQueries, bool, mx.array]]:
        """Positions (B, Q) of the queries, and the first fields of their plan."""
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
