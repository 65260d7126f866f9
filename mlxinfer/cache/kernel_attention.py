"""Short spans attend through a Metal kernel: one dispatch, two where a sequence is split.

Knows page tables and tails; chooses nothing.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..metal_kernels.attention_plan import AttentionPlan, plan_attention
from ..metal_kernels.paged_attention_kernel import paged_attention_on_metal
from .pool import LayerPool
from .reach import Reach
from .short_plan import Part
from .spans import Ints, ShortSpans


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Spans of at most 8 tokens that attend together."""

    rows: slice  # of the step's flat list
    plan: AttentionPlan

    def attend(
        self, pool: LayerPool, queries: mx.array, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these spans see, (T', heads, V)."""
        own = queries if self.rows.stop == len(queries) else queries[self.rows]
        outputs, _ = paged_attention_on_metal(
            own,
            pool.keys,
            pool.values,
            self.plan,
            scale=scale,
            sink_logits=sinks,
            value_dim=pool.values.fmt.dim,
        )
        return outputs


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
            tables=self._tables(short),
            page_size=self._page_size,
            kv_heads=self._kv_heads,
            window=self._reach.window,
            sinks=self._reach.sinks,
        )
        rows = slice(first, first + plan.num_queries)
        return [(np.arange(first, rows.stop, dtype=np.int32), KernelPlan(rows, plan))]

    def _tables(self, short: ShortSpans) -> list[Ints]:
        if self._reach.window is None:
            return short.lasting(("pages", self._group), lambda: _pages(short, self._group))
        return _pages(short, self._group)


def _pages(short: ShortSpans, group: int) -> list[Ints]:
    """For each span the page of every page number that is sealed; -1: let go of."""
    return [
        np.asarray(tables[group].numbers_before(stop))
        for tables, stop in zip(short.tables, short.sealed.tolist(), strict=True)
    ]
