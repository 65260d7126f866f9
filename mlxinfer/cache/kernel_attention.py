"""Short segments attend through a Metal kernel: one dispatch, two where a sequence is split.

Knows page tables and tails; chooses nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..metal_kernels.attention_plan import AttentionPlan, AttentionPlanner, page_table
from ..metal_kernels.paged_attention_kernel import PagedAttention
from .groups import AttentionWindow
from .inputs import Ints, Segments
from .pool import PagePool
from .step import Part


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Spans of at most 8 tokens that attend together."""

    rows: slice | None  # of the step's flat list; None: all
    plan: AttentionPlan
    # By sizes of a layer: those of a group that are alike share one. A model has one dtype.
    _prepared: dict[Hashable, PagedAttention] = field(default_factory=dict)

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
        own = queries if self.rows is None else queries[self.rows]
        sizes = pool.form, own.shape, scale, sinks is None, soft_cap
        attention = self._prepared.get(sizes)
        if attention is None:
            attention = self._prepared[sizes] = PagedAttention.of(
                own,
                pool.keys,
                pool.values,
                self.plan,
                scale=scale,
                sinks=sinks is not None,
                soft_cap=soft_cap,
                value_dim=pool.values.fmt.dim,
            )
        return attention(own, pool.keys, pool.values, sinks)[0]


class KernelPlanner:
    """Plans the short segments of a layer group.

    Args:
        group: the layer group.
        window: what its layers keep.
        page_size: tokens a page.
        kv_heads: of its layers.
    """

    def __init__(
        self, group: int, window: AttentionWindow, page_size: int, *, kv_heads: int
    ) -> None:
        self._group = group
        self._window = window
        self._page_size = page_size
        self._kv_heads = kv_heads

    def __call__(self, short: Segments, num_rows: int) -> Sequence[Part]:
        """Plan short segments that stand one after another in the flat list."""
        planner = short.memoised(("attention", self._group), lambda: self._planner(short))
        plan = planner(short.starts, self._pages(short))
        rows = short.memoised("flat rows", lambda: _flat_rows(short, plan.num_queries))
        everything = plan.num_queries == num_rows
        return [(rows, KernelPlan(None if everything else slice(rows[0], rows[-1] + 1), plan))]

    def _planner(self, short: Segments) -> AttentionPlanner:
        return AttentionPlanner(
            counts=short.counts,
            sealed=short.sealed,
            slots=short.slots,
            page_size=self._page_size,
            kv_heads=self._kv_heads,
            window=self._window.size,
            sinks=self._window.sinks,
        )

    def _pages(self, short: Segments) -> mx.array:
        if self._window.size is None:
            return short.memoised(("pages", self._group), lambda: _page_table(short, self._group))
        return _page_table(short, self._group)


def _flat_rows(short: Segments, count: int) -> Ints:
    """(T',) one after another."""
    return int(short.rows[0]) + np.arange(count, dtype=np.int32)


def _page_table(short: Segments, group: int) -> mx.array:
    """For each segment the page of every page number that is sealed."""
    return page_table(short.sealed_pages(group))
