"""Attention of a step over pages and tails.

`prepare` chooses how each part of a step attends. It chooses in every step, because kernels become
ready while the engine runs. A part runs through a kernel that is ready (`OnMetal`), or in plain
MLX: `Gathered` for short segments, `Chunk` for prefill chunks.

`Gathered` is the kernels' twin, and the path without Metal: pages and tails are gathered into one
padded array. B = segments, Q = tokens of each (padded), R = 2 * page_size, the ring of a tail,
N = tokens of gathered pages, H = KV heads, G = query heads per KV head, D = key dim, V = value dim.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import attrgetter

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.attention_plan import (
    AttentionPlan,
    AttentionPlanner,
    Numbers,
    joined,
    page_table,
    tile_sizes,
)
from ..metal_kernels.gathered_attention import (
    FUSED,
    GATHERED,
    gathered_attention,
    gathered_fused,
    whole_mask,
)
from ..metal_kernels.paged_attention import HIDDEN, AttentionCall, Softmax
from ..metal_kernels.variants import ANY_ROWS, KERNEL, first_way, never
from .chunks import Chunk
from .inputs import Ints, Segments, StepMetadata
from .paged import PagedLayer, SequencePlace, TailPlace
from .pages import AttentionWindow, PageGroup

READY = attrgetter("ready")
NO_TOKENS = np.zeros(0, np.int32)
BLOCK_BYTES = 1 << 25  # gathered together for a layer, where more than one segment is


def prepare(
    metadata: StepMetadata, group: PageGroup, layers: Sequence[PagedLayer], place: TailPlace
) -> "Prepared":
    """Prepare the attention of one step.

    Args:
        metadata: of the step.
        group: of the layers.
        layers: that will share what is prepared.
        place: where tokens go in tails.
    """
    if metadata.spans is not None and not group.window.sees_spans:
        metadata = replace(metadata, spans=None)
    short: list[AttentionPart] = []
    rows: list[Segments] = []  # of each part
    for segments in metadata.short:
        if _has_kernel(segments, metadata, layers):
            rows.append(segments)
            short.append(kernel_part(segments, metadata, group))
            continue
        for part_rows, part in gathered_parts(segments, metadata, group, layers):
            rows.append(part_rows)
            short.append(part)
    order = _order(rows, len(metadata.positions)) if len(rows) > 1 else None
    if not metadata.long:  # most steps
        return Prepared(metadata, group, place, short, order)
    chunks, tiles = [Chunk.of(segment, metadata, group) for segment in metadata.long], None
    ask = any(layer.fastest_prompt is not first_way for layer in layers)
    if ask and all(chunk.spans is None for chunk in chunks):
        tiles = tiled_part(reduce(Segments.joined, metadata.long), group)
    return Prepared(metadata, group, place, short, order, chunks, tiles)


def _has_kernel(segments: Segments, metadata: StepMetadata, layers: Sequence[PagedLayer]) -> bool:
    kernels = set(map(READY, layers))  # few: layers of a kernel share it
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
        group: of the layers.
        tiles: prefill chunks, which are written to pages before they attend.
    """

    __slots__ = ("_calls", "_group", "_plans", "_segments", "_tiles", "rows")

    def __init__(
        self,
        rows: slice | None,
        segments: Segments,
        group: PageGroup,
        *,
        tiles: bool = False,
    ) -> None:
        self.rows = rows
        self._segments, self._group, self._tiles = segments, group, tiles
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
        segments, (_, num_heads, dim) = self._segments, queries.shape
        if self._tiles:
            kv_heads = len(layer.keys.pages[0])
            sizes = tile_sizes(num_heads, kv_heads, dim, layer.values.read_dim)
        else:
            sizes = {"kv_heads": layer.plan_heads(num_heads, segments.width)}
        key = tuple(sizes.values())
        if key not in self._plans:
            planner = segments.memoised(
                ("plan", self._group.number, key), lambda: self._planner(sizes)
            )
            self._plans[key] = planner(segments.starts, self._pages())
        return self._plans[key]

    def _planner(self, sizes: dict[str, int]) -> AttentionPlanner:
        segments, group = self._segments, self._group
        return AttentionPlanner(
            counts=segments.counts,
            sealed=segments.sealed,
            slots=segments.slots,
            page_size=group.page_size,
            window=group.window.size,
            sinks=group.window.sinks,
            **sizes,
        )

    def _pages(self) -> mx.array:
        """The page table. Without a window it changes only when the segments change."""
        segments, number = self._segments, self._group.number
        if self._group.window.size is not None:
            return page_table(segments.sealed_pages(number))
        return segments.memoised(
            ("pages", number), lambda: page_table(segments.sealed_pages(number))
        )


def kernel_part(short: Segments, metadata: StepMetadata, group: PageGroup) -> OnMetal:
    """How the rows of short segments attend together."""
    count, first = short.num_tokens, int(short.rows[0])
    rows = None if count == len(metadata.positions) else slice(first, first + count)
    return OnMetal(rows, short, group)


def tiled_part(long: Segments, group: PageGroup) -> OnMetal:
    """How prefill chunks attend in tiles, over pages. They are neighbours in the flat list."""
    size, stops, first = group.page_size, long.starts + long.counts, int(long.rows[0])
    some = long.sealed_to(-(-stops // size) * size)  # they are written before they attend
    return OnMetal(slice(first, first + long.num_tokens), some, group, tiles=True)


# -- in plain MLX ----------------------------------------------------------------------------------


def gathered_parts(
    segments: Segments, metadata: StepMetadata, group: PageGroup, layers: Sequence[PagedLayer]
) -> "list[tuple[Segments, Gathered]]":
    """Short segments in parts of like length, and how each part attends.

    Args:
        segments: of the step.
        metadata: of the step.
        group: of the layers.
        layers: that will attend so.
    """
    if group.window.size is None:  # all sealed pages are seen
        blocks = segments.memoised(
            ("blocks", group.number), lambda: _blocks(segments, group, layers)
        )
    else:
        blocks = _blocks(segments, group, layers)
    if len(blocks) == 1:
        return [_gathered_part(segments, metadata, group)]
    parts = segments.memoised(
        ("parts", *[block.tobytes() for block in blocks]),
        lambda: [segments.some(block) for block in blocks],
    )
    together = [some.at(segments.starts[block]) for some, block in zip(parts, blocks, strict=True)]
    return [_gathered_part(some, metadata, group) for some in together]


def _blocks(
    segments: Segments, group: PageGroup, layers: Sequence[PagedLayer]
) -> list[NDArray[np.int64]]:
    pages = num_visible(segments, group.window, group.page_size)
    token_bytes = max([layer.read_bytes for layer in layers], default=1)
    return gather_blocks(pages, BLOCK_BYTES // (token_bytes * group.page_size))


def num_visible(short: Segments, window: AttentionWindow, page_size: int) -> Ints:
    """(B,) the number of sealed pages that each segment sees at least a part of."""
    pages = short.sealed // page_size
    if window.size is None:
        return pages
    first = window.lowest_of(short.starts) // page_size
    num_sinks = np.minimum(window.kept_pages(page_size), first)
    return np.minimum(num_sinks, pages) + np.maximum(pages - first, 0)


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


@dataclass(slots=True)
class Gathered:
    """B short segments that attend together over gathered pages and tails.

    Attributes:
        rows: (B * Q,) flat rows of the queries; None: all of the step, in order.
        unpad: (T',) from the padded (B * Q) outputs back to flat order; None: nothing is padded.
        slots: (B,) of the tails.
        tail_mask: (B, 1, Q, R) additive.
        page_ids: (B, n) of the pages that are gathered; None: no segment sees any.
        mask: (B, 1, 1 or Q, n * page_size) additive; None: all of the pages is seen.
        _whole_mask: of both, for MLX's own attention, once a layer asked for it.
    """

    rows: slice | mx.array | None
    unpad: mx.array | None
    slots: mx.array | slice
    tail_mask: mx.array
    page_ids: mx.array | None
    mask: mx.array | None
    _whole_mask: mx.array | None = None

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (B * Q, heads, D) -> what the segments see, (T', heads * V)."""
        pages = None
        if self.page_ids is not None:
            # Without the dependency all layers might gather first.
            ids = mx.depends([self.page_ids], [queries])[0]
            keys, values = layer.read_pages(ids)
            pages = keys.swapaxes(0, 1), values.swapaxes(0, 1)
        tails = layer.read_tails(self.slots)
        if layer.fastest is not first_way and self._is_fused(layer, softmax):
            if self._whole_mask is None:
                self._whole_mask = whole_mask(self.mask, self.tail_mask, pages)
            outputs = gathered_fused(queries, pages, tails, self._whole_mask, softmax)
        else:
            masks = self.mask, self.tail_mask
            outputs = gathered_attention(queries, pages, tails, masks, softmax)
        return outputs if self.unpad is None else outputs[self.unpad]

    def _is_fused(self, layer: PagedLayer, softmax: Softmax) -> bool:
        """Whether MLX's own attention is faster here."""
        if softmax.soft_cap is not None:
            return False
        num_sequences, _, num_queries, _ = self.tail_mask.shape
        return layer.fastest(num_queries, num_sequences, (GATHERED, FUSED)) == FUSED


def _gathered_part(
    segments: Segments, metadata: StepMetadata, group: PageGroup
) -> tuple[Segments, Gathered]:
    """Segments and how they attend: each sees a page at least, or none does."""
    step, rows, unpad, slots, tail_begins = segments.memoised(
        "queries", lambda: _queries(segments, group.page_size)
    )
    positions = segments.starts[:, None] + step  # (B, Q)
    whole = positions.size == len(metadata.positions) and unpad is None
    spans = None if metadata.spans is None else metadata.spans[:, segments.rows[:, None] + step]
    part = Gathered(
        None if whole else rows,
        unpad,
        slots,
        _tail_mask(segments, positions, tail_begins, spans, group),
        *_seen_pages(segments, positions, group),
    )
    return segments, part


def _queries(
    short: Segments, page_size: int
) -> tuple[Ints, mx.array | slice, mx.array | None, mx.array | slice, Ints]:
    """Where queries and tails of segments are, whatever their positions.

    Returns:
        (B, Q) the token of its segment at each place: the last one is repeated; `rows`, `unpad` and
        `slots`, see `Gathered`; and rows (B, 1, 1) of `_ring_masks`, less the positions.
    """
    ring, sealed = 2 * page_size, short.sealed[:, None]
    step = np.minimum(np.arange(short.width, dtype=np.int32), short.counts[:, None] - 1)
    real = np.arange(short.width) < short.counts[:, None]  # (B, Q)
    unpad = None if real.all() else mx.array(np.flatnonzero(real))
    begins = (sealed // page_size % 2 * ring - sealed)[:, None]
    rows = _as_index((short.rows[:, None] + step).ravel())
    return step, rows, unpad, _as_index(short.slots), begins


def _as_index(rows: Ints) -> mx.array | slice:
    """Consecutive rows as a slice, which costs no copy; any others as an array."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(start, stop)
    return mx.array(rows)


def _tail_mask(
    segments: Segments, positions: Ints, begins: Ints, spans: Ints | None, group: PageGroup
) -> mx.array:
    """(B, 1, Q, R) additive: what queries at `positions` (B, Q) see of their tails.

    Args:
        begins: rows of `_ring_masks`, less the positions.
        spans: (2, B, Q) of the queries; None: they see no later token.
    """
    window, size = group.window, group.page_size
    sees_tail = window.size is None or (window.size >= 2 * size and not window.chunked)
    if sees_tail and spans is None:  # a token sees all of the tail before it
        return _ring_masks(size)[mx.array(positions[:, None] + begins)]
    # Ring slot j holds the one position p >= sealed with p % R == j.
    sealed, places = segments.sealed[:, None], np.arange(2 * size, dtype=np.int32)
    held = sealed + (places - sealed) % (2 * size)  # (B, R)
    also = None if spans is None else spans[..., None]
    return mx.array(additive(window.sees(positions[..., None], held[:, None], also))[:, None])


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


def _seen_pages(
    segments: Segments, positions: Ints, group: PageGroup
) -> tuple[mx.array | None, mx.array | None]:
    """Ids (B, n) of the pages that any query sees, and their mask (B, 1, 1 or Q, n * page_size).

    A span lies in the step that computes it, and so never in a page of an earlier step.
    """
    window, size = group.window, group.page_size
    if window.size is None:
        return segments.memoised(("gather", group.number), lambda: _all_pages(segments, group))
    if not num_visible(segments, window, size).any():
        return None, None
    return _window_pages(segments, group, positions)


def _all_pages(short: Segments, group: PageGroup) -> tuple[mx.array | None, mx.array | None]:
    """Ids (B, n) of all sealed pages, and the mask (B, 1, 1, n * page_size) of the padding."""
    if not short.sealed.any():
        return None, None
    ids, real = _padded(short.sealed_pages(group.number))
    if real.all():
        return mx.array(ids), None
    mask = np.repeat(additive(real), group.page_size, axis=1)
    return mx.array(ids), mx.array(mask[:, None, None])


def _window_pages(short: Segments, group: PageGroup, positions: Ints) -> tuple[mx.array, mx.array]:
    """Ids (B, n) of the pages that anything is seen of, and the mask (B, 1, Q, n * page_size)."""
    window, page_size = group.window, group.page_size
    tables, numbers = [], []
    for row, start, sealed in zip(
        short.tables, short.starts.tolist(), short.sealed.tolist(), strict=True
    ):
        first = window.first_page(start, page_size)
        stop = sealed // page_size
        sinks = np.arange(min(window.kept_pages(page_size), first, stop), dtype=np.int32)
        seen = np.concatenate([sinks, np.arange(first, stop, dtype=np.int32)])
        numbers.append(seen)
        tables.append(np.asarray(row[group.number].numbers_before(sealed))[seen])
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


# -- all parts of a step ---------------------------------------------------------------------------


AttentionPart = OnMetal | Gathered | Chunk
"""Some rows of a step that attend together: `rows` of the flat list, None: all, and `attend`."""


class Prepared:
    """All that the layers of a group share in one step.

    Args:
        metadata: of the step.
        group: of the layers.
        place: where tokens go in tails.
        short: how the rows of short segments attend, part by part.
        order: what `_order` returns for these rows.
        chunks: prefill chunks, which come last in the flat list.
        tiles: the same chunks through a kernel, for layers that have one.
    """

    __slots__ = (
        *("_order", "_parts", "_sequences", "_tiled", "chunks", "group", "metadata"),
        *("page_writes", "place", "short"),
    )

    def __init__(
        self,
        metadata: StepMetadata,
        group: PageGroup,
        place: TailPlace,
        short: Sequence[AttentionPart],
        order: mx.array | None,
        chunks: Sequence[Chunk] = (),
        tiles: OnMetal | None = None,
    ) -> None:
        self.metadata, self.group, self.place = metadata, group, place
        self.short, self.chunks = short, chunks
        self.page_writes = [(chunk.rows.start, chunk.writes) for chunk in chunks]
        self._parts: list[AttentionPart] = [*short, *chunks]
        self._tiled = self._parts if tiles is None else [*short, tiles]
        self._order = order
        self._sequences: list[SequencePlace] | None = None

    @property
    def num_short(self) -> int:
        """Rows of short segments, which come first in the flat list."""
        chunks = self.metadata.long
        return int(chunks[0].rows[0]) if chunks else len(self.metadata.positions)

    def sequences(self) -> list[SequencePlace]:
        """The sequences of the step, in flat order, and where all of their tokens lie."""
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

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Attention of queries (T, heads, D) of all rows, (T, heads * V)."""
        parts = self._parts
        if self._tiled is not parts and self._is_tiled(layer, queries.shape[-1], softmax):
            parts = self._tiled
        if len(parts) == 1:
            rows = parts[0].rows
            return parts[0].attend(layer, queries if rows is None else queries[rows], softmax)
        return self.joined([attend_rows(part, layer, queries, softmax) for part in parts])

    def _is_tiled(self, layer: PagedLayer, key_dim: int, softmax: Softmax) -> bool:
        """Whether the kernel is faster for chunks: for the one with the most work."""
        if layer.fastest_prompt is first_way:
            return False
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


def _order(parts: Sequence[Segments], num_rows: int) -> mx.array | None:
    """(T,) the place of each row of the step in the outputs of `parts`; None: they are in order."""
    rows = np.concatenate([segments.tokens()[0] for segments in parts])
    if (np.diff(rows) > 0).all():
        return None
    order = np.arange(num_rows, dtype=np.int32)
    order[rows] = np.arange(len(rows), dtype=np.int32)
    return mx.array(order)
