"""Segments attend through Metal kernels: one dispatch, two where a sequence is split.

Knows page tables and tails, and asks which kernels may be used.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..metal_kernels.attention_plan import AttentionPlan, AttentionPlanner, page_table
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.paged_attention_kernel import PagedAttention
from ..metal_kernels.prefill_attention import tiled
from ..metal_kernels.prefill_plan import Chunks
from .groups import AttentionWindow
from .inputs import Ints, QuerySegment, Segments, ints
from .pool import PagePool
from .step import Part, Planner, ShortPlan

# By sizes of a layer: those of a group that are alike share one. A model has one dtype.
Attentions = dict[Hashable, PagedAttention]


def _prepared(
    known: Attentions,
    softmax: Softmax,
    pool: PagePool,
    queries: mx.array,
    plan: Callable[[], AttentionPlan],
) -> PagedAttention:
    """The attention of queries over a pool, made once for all layers with such sizes."""
    has_sinks = softmax.sinks is not None
    sizes = pool.form, queries.shape, softmax.scale, has_sinks, softmax.soft_cap
    attention = known.get(sizes)
    if attention is None:
        attention = known[sizes] = PagedAttention.of(
            queries,
            pool.keys,
            pool.values,
            plan(),
            scale=softmax.scale,
            sinks=has_sinks,
            soft_cap=softmax.soft_cap,
            value_dim=pool.values.fmt.dim,
        )
    return attention


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Spans of at most 8 tokens that attend together."""

    rows: slice | None  # of the step's flat list; None: all
    plan: AttentionPlan
    _attentions: Attentions = field(default_factory=dict)

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of these segments see, (T', heads * V)."""
        own = queries if self.rows is None else queries[self.rows]
        attention = _prepared(self._attentions, softmax, pool, own, lambda: self.plan)
        return attention(own, pool.keys, pool.values, softmax.sinks)[0]


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


ReadyFor = Callable[[int], bool]  # whether segments of up to so many tokens have a kernel now


@dataclass(frozen=True, slots=True)
class ChosenPlanner:
    """Plans the short segments of a layer group for kernels, where all of its layers have them.

    Attributes:
        kernels, plain: the planners.
        ready: of the layers; options before each plan, since kernels may become ready later.
    """

    kernels: Planner
    plain: Planner
    ready: Sequence[ReadyFor]

    def __call__(self, short: Segments, num_rows: int) -> Sequence[Part]:
        """Plan short segments that stand one after another in the flat list."""
        missing = [ready for ready in self.ready if not ready(short.width)]  # asks for all of them
        return (self.plain if missing else self.kernels)(short, num_rows)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Prefill chunks of a step that attend together, over pages alone."""

    rows: slice  # of the step's flat list
    chunks: Chunks
    _attentions: Attentions = field(default_factory=dict)

    def attend(
        self,
        pool: PagePool,
        queries: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Flat queries (T, heads, D) -> what those of the chunks see, (T', heads * V)."""
        own = queries[self.rows]
        attention = _prepared(
            self._attentions,
            softmax,
            pool,
            own,
            lambda: tiled(self.chunks, own, pool.keys, pool.values.fmt.dim),
        )
        return attention(own, pool.keys, pool.values, softmax.sinks)[0]


class PrefillPlanner:
    """Plans the prefill chunks of a layer group; arguments as for `KernelPlanner`."""

    def __init__(self, group: int, window: AttentionWindow, page_size: int) -> None:
        self._group = group
        self._window = window
        self._page_size = page_size

    def __call__(self, long: Sequence[QuerySegment]) -> ShortPlan:
        """Plan chunks that stand one after another in the flat list, at its end."""
        size, counts = self._page_size, ints([segment.num_tokens for segment in long])
        stops = ints([segment.stop for segment in long])
        sealed = -(-stops // size) * size  # chunks are written to pages before they attend
        tables = [
            segment.tables[self._group].numbers_before(stop)
            for segment, stop in zip(long, sealed.tolist(), strict=True)
        ]
        first = long[0].row
        chunks = Chunks(
            rows=ints([segment.row - first for segment in long]),
            starts=stops - counts,
            counts=counts,
            sealed=sealed,
            slots=ints([segment.slot for segment in long]),
            pages=page_table(tables),
            page_size=size,
            window=self._window.size,
            sinks=self._window.sinks,
        )
        return PrefillPlan(slice(first, first + int(counts.sum())), chunks)


def _flat_rows(short: Segments, count: int) -> Ints:
    """(T',) the rows of segments that stand one after another."""
    return int(short.rows[0]) + np.arange(count, dtype=np.int32)


def _page_table(short: Segments, group: int) -> mx.array:
    """For each segment the page of every page number that is sealed."""
    return page_table(short.sealed_pages(group))
