"""Attention of a step over pages and tails.

`prepare` says for the layers of a group how each part of a step attends: once a step, since kernels
become ready while the engine runs. Short segments attend through a kernel that is ready
(`OnMetal`), or in plain MLX (`Gathered`). Prefill chunks attend in plain MLX (`Chunk`), or all of
them through a kernel. `Prepared` joins what the parts give.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import reduce
from operator import attrgetter

import mlx.core as mx
import numpy as np

from ..metal_kernels.attention_plan import AttentionPlan, AttentionPlanner, page_table, tile_sizes
from ..metal_kernels.paged_attention import AttentionCall, Softmax
from ..metal_kernels.variants import ANY_ROWS, KERNEL, first_way, never
from .chunks import Chunk
from .gathered import Gathered, gathered_parts
from .inputs import Ints, Segments, StepMetadata
from .paged import PagedLayer, SequencePlace, TailPlace
from .pages import PageGroup

NO_TOKENS = np.zeros(0, np.int32)


def prepare(
    metadata: StepMetadata, group: PageGroup, layers: Sequence[PagedLayer], place: TailPlace
) -> "Prepared":
    """Prepare the attention of one step."""
    if metadata.spans is not None and not group.window.sees_spans:
        metadata = replace(metadata, spans=None)
    short: list[OnMetal | Gathered] = []
    for segments in metadata.short:
        if _has_kernel(segments, metadata, layers):
            short.append(kernel_part(segments, metadata, group))
        else:
            short += gathered_parts(segments, metadata, group, layers)
    if not metadata.long:  # most steps
        return Prepared(metadata, group, layers, place, short)
    chunks, tiles = [Chunk.of(segment, metadata, group) for segment in metadata.long], None
    ask = any(layer.fastest_prompt is not first_way for layer in layers)
    if ask and all(chunk.spans is None for chunk in chunks):
        tiles = tiled_part(reduce(Segments.joined, metadata.long), group)
    return Prepared(metadata, group, layers, place, short, chunks, tiles)


def _has_kernel(segments: Segments, metadata: StepMetadata, layers: Sequence[PagedLayer]) -> bool:
    kernels = set(map(attrgetter("ready"), layers))  # few: layers of a kernel share it
    if not kernels or never in kernels:
        return False
    if metadata.spans_of(int(segments.rows[0]), segments.num_tokens) is not None:
        return False
    size = segments.width, len(segments)
    ready = [is_ready(*size) for is_ready in kernels]  # all of them are asked
    return all(ready)


class OnMetal:
    """Rows of a step that attend together through a kernel.

    It takes one dispatch, or two if the context is split. Layers of the same sizes share the plan
    and the launches.

    Args:
        rows: of the step's flat list; None: all.
        segments: of these rows, one after another.
        tiles: prefill chunks, which are written to pages before they attend.
    """

    __slots__ = ("_calls", "_group", "_plans", "_tiles", "rows", "segments")

    def __init__(
        self, rows: slice | None, segments: Segments, group: PageGroup, *, tiles: bool = False
    ) -> None:
        self.rows = rows
        self.segments, self._group, self._tiles = segments, group, tiles
        self._calls: dict[Hashable, AttentionCall] = {}
        self._plans: dict[tuple[int, ...], AttentionPlan] = {}

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Attention of queries (N, heads, D), (N, heads * V)."""
        has_sinks = softmax.sinks is not None
        sizes = layer.form, queries.shape, softmax.scale, has_sinks, softmax.soft_cap
        call = self._calls.get(sizes)
        if call is None:
            call = self._calls[sizes] = layer.kernel(queries, self._plan(layer, queries), softmax)
        return call(queries, layer.kernel_arrays(), softmax.sinks)[0]

    def _plan(self, layer: PagedLayer, queries: mx.array) -> AttentionPlan:
        segments, group, (_, num_heads, dim) = self.segments, self._group, queries.shape
        if self._tiles:
            kv_heads = len(layer.keys.pages[0])
            sizes = tile_sizes(num_heads, kv_heads, dim, layer.values.read_dim)
        else:
            sizes = {"kv_heads": layer.plan_heads(num_heads, segments.width)}
        key = tuple(sizes.values())
        if key not in self._plans:
            planner = segments.memoised(
                ("plan", group.number, key),
                lambda: AttentionPlanner(
                    counts=segments.counts,
                    sealed=segments.sealed,
                    slots=segments.slots,
                    page_size=group.page_size,
                    window=group.window.size,
                    sinks=group.window.sinks,
                    **sizes,
                ),
            )
            self._plans[key] = planner(segments.starts, self._pages())
        return self._plans[key]

    def _pages(self) -> mx.array:
        """The page table. Without a window it changes only when the segments change."""
        segments, number = self.segments, self._group.number
        tables = segments.sealed_pages
        if self._group.window.size is not None:
            return page_table(tables(number))
        return segments.memoised(("pages", number), lambda: page_table(tables(number)))


def kernel_part(short: Segments, metadata: StepMetadata, group: PageGroup) -> OnMetal:
    count, first = short.num_tokens, int(short.rows[0])
    rows = None if count == len(metadata.positions) else slice(first, first + count)
    return OnMetal(rows, short, group)


def tiled_part(long: Segments, group: PageGroup) -> OnMetal:
    """How prefill chunks attend in tiles, over pages. They are neighbours in the flat list."""
    size, stops, first = group.page_size, long.starts + long.counts, int(long.rows[0])
    part = long.sealed_to(-(-stops // size) * size)  # they are written before they attend
    return OnMetal(slice(first, first + long.num_tokens), part, group, tiles=True)


AttentionPart = OnMetal | Gathered | Chunk
"""Some rows of a step that attend together: `rows` of the flat list, None: all, and `attend`."""


class Prepared:
    """All that the layers of a group share in one step.

    Args:
        short: how the rows of short segments attend, part by part.
        chunks: prefill chunks, which come last in the flat list.
        tiles: the same chunks through a kernel, for layers that have one.
    """

    __slots__ = (
        *("_layers", "_narrowed", "_order", "_parts", "_sequences", "_tiled", "chunks", "group"),
        *("metadata", "page_writes", "place", "short"),
    )

    def __init__(
        self,
        metadata: StepMetadata,
        group: PageGroup,
        layers: Sequence[PagedLayer],
        place: TailPlace,
        short: Sequence[OnMetal | Gathered],
        chunks: Sequence[Chunk] = (),
        tiles: OnMetal | None = None,
    ) -> None:
        self.metadata, self.group, self.place = metadata, group, place
        self.short, self.chunks = short, chunks
        self.page_writes = [(chunk.rows.start, chunk.writes) for chunk in chunks]
        self._parts: list[AttentionPart] = [*short, *chunks]
        self._tiled: list[AttentionPart] = self._parts if tiles is None else [*short, tiles]
        self._order = _order(short, len(metadata.positions)) if len(short) > 1 else None
        self._layers = layers
        self._sequences: list[SequencePlace] | None = None
        self._narrowed: Prepared | None = None

    @property
    def num_short(self) -> int:
        chunks = self.metadata.long
        return int(chunks[0].rows[0]) if chunks else len(self.metadata.positions)

    def sequences(self) -> list[SequencePlace]:
        if self._sequences is None:
            number, size, window = self.group.number, self.group.page_size, self.group.window
            self._sequences = places = []
            for short in self.metadata.short:
                numbers = (short.rows, short.starts, short.counts, short.sealed, short.slots)
                parts = zip(*(array.tolist() for array in numbers), short.tables, strict=True)
                for row, start, count, sealed, slot, tables in parts:
                    tail = np.arange(sealed, start + count, dtype=np.int32) % (2 * size)
                    first = min(window.first_page(start, size) * size, sealed)
                    runs = tables[number].runs(first, sealed)
                    pages = mx.array(tables[number].numbers_before(sealed))
                    rows = slice(row, row + count)
                    places.append(SequencePlace(rows, start, runs, pages, slot, tail, first))
            for chunk, long in zip(self.chunks, self.metadata.long, strict=True):
                slot, (first, _) = int(long.slots[0]), chunk.ranges[0]
                place = chunk.rows, chunk.start, chunk.reads, None, slot, NO_TOKENS, first
                places.append(SequencePlace(*place))
        return self._sequences

    def of_rows(self, rows: Ints | None) -> "Prepared":
        """The same step, where `rows` (R,) alone attend, see `StepMetadata.narrowed`.

        `rows`: the same in every call; None: all attend.
        """
        if rows is None:
            return self
        if self._narrowed is None:
            metadata = self.metadata.narrowed(rows)
            self._narrowed = prepare(metadata, self.group, self._layers, self.place)
        return self._narrowed

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Attention of queries (T, heads, D) of all rows, (T, heads * V)."""
        parts = self._parts
        if self._tiled is not parts and self._is_tiled(layer, queries.shape[-1], softmax):
            parts = self._tiled
        if len(parts) == 1:  # most steps: each layer makes three calls less
            rows = parts[0].rows
            return parts[0].attend(layer, queries if rows is None else queries[rows], softmax)
        return self.joined([attend_rows(part, layer, queries, softmax) for part in parts])

    def _is_tiled(self, layer: PagedLayer, key_dim: int, softmax: Softmax) -> bool:
        """Whether the kernel is faster for chunks: for the one with the most work."""
        chunk = max(self.chunks, key=lambda chunk: chunk.num_queries * chunk.num_keys)
        ways = *chunk.ways_of(layer, key_dim, softmax), KERNEL
        return layer.fastest_prompt(ANY_ROWS, chunk.num_queries, ways) == KERNEL

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """Outputs of all parts, (T, ...) in flat order."""
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate([*outputs])
        return joined if self._order is None else joined[self._order]


def attend_rows(
    part: AttentionPart, layer: PagedLayer, queries: mx.array, softmax: Softmax
) -> mx.array:
    """Attend for the rows of one part, (T', heads * V); queries (T, heads, D) are of all rows."""
    return part.attend(layer, queries if part.rows is None else queries[part.rows], softmax)


def _order(parts: Sequence[OnMetal | Gathered], num_rows: int) -> mx.array | None:
    """(T,) the place of each row of the step in the outputs of `parts`; None: they are in order."""
    rows = np.concatenate([part.segments.tokens()[0] for part in parts])
    if (np.diff(rows) > 0).all():
        return None
    order = np.arange(num_rows, dtype=np.int32)
    order[rows] = np.arange(len(rows), dtype=np.int32)
    return mx.array(order)
