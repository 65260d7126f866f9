"""Short spans attend through a Metal kernel: one dispatch, two where a sequence is split.

Knows page tables and tails; chooses nothing.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..metal_kernels.attention_plan import AttentionPlan, page_table, plan_attention
from ..metal_kernels.paged_attention_kernel import PagedAttention
from .pool import LayerPool
from .reach import Reach
from .short_plan import Part
from .spans import ShortSpans


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Spans of at most 8 tokens that attend together."""

    rows: slice  # of the step's flat list
    plan: AttentionPlan
    _prepared: dict[Hashable, PagedAttention] = field(default_factory=dict)  # by sizes of a layer

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these spans see, (T', heads, V)."""
        own = queries if self.rows.stop == len(queries) else queries[self.rows]
        sizes = pool.form, own.shape[1], own.dtype, sinks is None
        attention = self._prepared.get(sizes)
        if attention is None:
            attention = self._prepared[sizes] = self._prepare(pool, own, sinks)
        return attention(own, pool.keys, pool.values, scale, sinks)[0]

    def _prepare(
        self, pool: LayerPool, queries: mx.array, sinks: mx.array | None
    ) -> PagedAttention:
        """For all layers of the group that are like this one."""
        return PagedAttention.of(
            queries,
            pool.keys,
            pool.values,
            self.plan,
            sinks=sinks is not None,
            value_dim=pool.values.fmt.dim,
        )


class KernelPlanner:
    """Plans the short spans of a layer group.

    Args:
        group: the layer group.
        reach: what its layers keep.
        page_size: tokens a page.
        kv_heads: of its layers.
    """

    def __init__(self, group: int, reach: Reach, page_size: int, *, kv_heads: int) -> None:
        self._group = group
        self._reach = reach
        self._page_size = page_size
        self._kv_heads = kv_heads

    def __call__(self, short: ShortSpans, num_rows: int) -> list[Part]:
        """Spans of a step whose tokens stand one after another in the flat list."""
        first = int(short.rows[0])
        plan = plan_attention(
            starts=short.starts,
            stops=short.starts + short.counts,
            sealed=short.sealed,
            slots=short.slots,
            pages=self._pages(short),
            page_size=self._page_size,
            kv_heads=self._kv_heads,
            window=self._reach.window,
            sinks=self._reach.sinks,
        )
        rows = slice(first, first + plan.num_queries)
        return [(np.arange(first, rows.stop, dtype=np.int32), KernelPlan(rows, plan))]

    def _pages(self, short: ShortSpans) -> mx.array:
        if self._reach.window is None:
            return short.lasting(("pages", self._group), lambda: _page_table(short, self._group))
        return _page_table(short, self._group)


def _page_table(short: ShortSpans, group: int) -> mx.array:
    """For each span the page of every page number that is sealed."""
    return page_table(
        [
            np.asarray(tables[group].numbers_before(stop))
            for tables, stop in zip(short.tables, short.sealed.tolist(), strict=True)
        ]
    )
