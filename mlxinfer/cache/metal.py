"""The attention backend of Metal kernels, for the segments of a step that have one.

Segments without a kernel attend in plain MLX: this is the one place that chooses, step by step,
since kernels become ready while the engine runs.
"""

from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx
import numpy as np

from ..metal_kernels.attention_plan import AttentionPlan, AttentionPlanner, page_table
from ..metal_kernels.attention_reduce import Attention
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.prefill_plan import Chunks, tiled
from ..metal_kernels.variants import ReadyFor
from .inputs import Ints, QuerySegment, Segments, StepMetadata, ints
from .paged import PagedLayer, Part, Prepared, TailPlace
from .pages import PageGroup
from .plain import PlainAttention, chunks_of

PlanFor = Callable[[PagedLayer, mx.array], AttentionPlan]  # of a layer and its queries


class OnMetal:
    """Rows of a step that attend together through a kernel: one dispatch, two where they are split.

    Layers of the same sizes share the plan and the launches.

    Args:
        rows: of the step's flat list; None: all.
        plan: of a layer and its queries.
    """

    __slots__ = ("_known", "_plan", "rows")

    def __init__(self, rows: slice | None, plan: PlanFor) -> None:
        self.rows = rows
        self._plan = plan
        self._known: dict[Hashable, Attention] = {}

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (N, heads, D) -> what they see, (N, heads * V)."""
        has_sinks = softmax.sinks is not None
        sizes = layer.form, queries.shape, softmax.scale, has_sinks, softmax.soft_cap
        attention = self._known.get(sizes)
        if attention is None:
            plan = self._plan(layer, queries)
            attention = self._known[sizes] = layer.kernel(queries, plan, softmax)
        return attention(queries, layer.kernel_arrays(), softmax.sinks)[0]


class MetalAttention:
    """Attention through Metal kernels, as far as they are ready.

    Args:
        plain: for other segments.
        ready: of all layers of the group; asked in each step, since kernels may become ready later.
        tiles: some layer has a kernel for prefill chunks, over pages alone.
    """

    def __init__(self, plain: PlainAttention, ready: Sequence[ReadyFor], *, tiles: bool) -> None:
        self._plain = plain
        self._ready = ready
        self._tiles = tiles

    def prepare(
        self, metadata: StepMetadata, group: PageGroup, number: int, place: TailPlace
    ) -> Prepared:
        """As of `PlainAttention`."""
        short: list[tuple[Ints, Part]] = []
        for segments in metadata.short:
            if self._has_kernel(segments, metadata):
                short.append(short_part(segments, metadata, group, number))
            else:
                short += self._plain.short_parts(segments, metadata, group, number)
        chunks, tiles = chunks_of(metadata, group, number), None
        if self._tiles and chunks and all(chunk.spans is None for chunk in chunks):
            tiles = tiled_part(metadata.long, group, number)
        return Prepared(metadata, number, place, short, chunks, tiles)

    def _has_kernel(self, segments: Segments, metadata: StepMetadata) -> bool:
        """Whether all layers have a kernel for short segments."""
        if metadata.spans_of(int(segments.rows[0]), segments.num_tokens) is not None:
            return False
        missing = [ready for ready in self._ready if not ready(segments.width)]  # asks for them all
        return not missing


def short_part(
    short: Segments, metadata: StepMetadata, group: PageGroup, number: int
) -> tuple[Ints, OnMetal]:
    """The rows of short segments, and how they attend together."""
    count, first = short.num_tokens, int(short.rows[0])
    everything = count == len(metadata.positions)
    rows = short.memoised("flat rows", lambda: first + np.arange(count, dtype=np.int32))
    pages = None
    if group.window.size is None:
        pages = short.memoised(("pages", number), lambda: page_table(short.sealed_pages(number)))
    known: dict[int, AttentionPlan] = {}  # by KV heads

    def plan(layer: PagedLayer, queries: mx.array) -> AttentionPlan:
        nonlocal pages
        heads = layer.plan_heads(queries.shape[1], short.width)
        if heads not in known:
            planner = short.memoised(("plan", number, heads), lambda: _planner(short, group, heads))
            if pages is None:
                pages = page_table(short.sealed_pages(number))
            known[heads] = planner(short.starts, pages)
        return known[heads]

    return rows, OnMetal(None if everything else slice(first, first + count), plan)


def _planner(short: Segments, group: PageGroup, kv_heads: int) -> AttentionPlanner:
    return AttentionPlanner(
        counts=short.counts,
        sealed=short.sealed,
        slots=short.slots,
        page_size=group.page_size,
        kv_heads=kv_heads,
        window=group.window.size,
        sinks=group.window.sinks,
    )


def tiled_part(long: Sequence[QuerySegment], group: PageGroup, number: int) -> OnMetal:
    """Prefill chunks that stand one after another in the flat list attend in tiles, over pages."""
    first, last = long[0].row, long[-1]
    made: list[Chunks] = []

    def plan(layer: PagedLayer, queries: mx.array) -> AttentionPlan:
        if not made:
            made.append(_chunks(long, group, number))
        return tiled(made[0], queries, layer.keys, layer.values.dim)

    return OnMetal(slice(first, last.row + last.num_tokens), plan)


def _chunks(long: Sequence[QuerySegment], group: PageGroup, number: int) -> Chunks:
    size, counts = group.page_size, ints([segment.num_tokens for segment in long])
    stops = ints([segment.stop for segment in long])
    sealed = -(-stops // size) * size  # chunks are written to pages before they attend
    tables = [
        segment.tables[number].numbers_before(stop)
        for segment, stop in zip(long, sealed.tolist(), strict=True)
    ]
    return Chunks(
        rows=ints([segment.row - long[0].row for segment in long]),
        starts=stops - counts,
        counts=counts,
        sealed=sealed,
        slots=ints([segment.slot for segment in long]),
        pages=page_table(tables),
        page_size=size,
        window=group.window.size,
        sinks=group.window.sinks,
    )
