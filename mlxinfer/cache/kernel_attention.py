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


def plan_kernel(
    short: ShortSpans, group: int, reach: Reach, page_size: int, kv_heads: int
) -> KernelPlan:
    """Plan spans of one step, whose tokens stand one after another in the flat list."""
    first = int(short.rows[0])
    plan = plan_attention(
        starts=short.starts,
        stops=short.starts + short.counts,
        sealed=short.sealed,
        slots=short.slots,
        tables=short.lasting(("pages", group), lambda: _pages(short, group))
        if reach.window is None
        else _pages(short, group),
        page_size=page_size,
        kv_heads=kv_heads,
        window=reach.window,
        sinks=reach.sinks,
    )
    return KernelPlan(slice(first, first + plan.num_queries), plan)


def _pages(short: ShortSpans, group: int) -> list[Ints]:
    """For each span the page of every page number that is sealed; -1: let go of."""
    return [
        np.asarray(tables[group].numbers_before(stop))
        for tables, stop in zip(short.tables, short.sealed.tolist(), strict=True)
    ]
