"""Short segments attend in plain MLX: over their pages, gathered into one padded array. No queue.

Where sequences are many and short this takes a handful of operations for all of them, where views
of runs take a handful for each; the copy is what it costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.attention_plan import Numbers, joined
from ..metal_kernels.paged_attention import gathered_attention
from .pool import LayerPool
from .queries import ShortQueries, additive, plan_queries
from .segments import Ints, Segments
from .window import AttentionWindow


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """B segments that see n pages each, padded."""

    queries: ShortQueries
    page_ids: mx.array  # (B, n)
    mask: mx.array | None  # (B, 1, 1 or Q, n * page_size) additive; None: all is seen

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        own = self.queries.take(queries)
        ids = mx.depends([self.page_ids], [own])[0]  # else all layers might gather first
        outputs = gathered_attention(
            own,
            pool.keys.read_pages(ids, pool.page_size).transpose(1, 0, 3, 2),
            pool.values.read_pages(ids, pool.page_size).swapaxes(0, 1),
            self.mask,
            *self.queries.tails(pool),
            scale=scale,
            sinks=sinks,
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

    Its own: what another sequence has computed must not window this one, not even times zero.
    """
    entries, lengths = joined(rows)
    assert lengths.all()
    first = np.cumsum(lengths) - lengths
    places = np.arange(lengths.max())
    last = lengths[:, None] - 1
    return entries[first[:, None] + np.minimum(places, last)], places <= last
