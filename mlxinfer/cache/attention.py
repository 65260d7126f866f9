"""Attention of a step over pages and tails: through Metal kernels as far as they are ready.

`AttentionBackend` is the one place that chooses, step by step, since kernels become ready while the
engine runs. Everything else is done in MLX's own operations: short segments are gathered, so that
their pages and tails become one padded array; prefill chunks read pages alone, at once where MLX's
attention is fused, else in blocks.

B = segments, Q = tokens of each (padded), R = 2 * page_size, the ring of a tail, n = query tokens
of a chunk, H = KV heads, S = keys that a chunk reads, V = value dim.

MLX's fused attention on Metal keeps no scores. It takes more than 8 queries at head dims up to 128
(`FUSED_DIMS`; at 192 and 256 it has kernels and prefers to materialise scores, but for one case on
the newest GPUs: mlx/backend/metal/scaled_dot_product_attention.cpp, 0.32.2). Everything else is
done in blocks of queries and keys: scores, and what is decoded or copied of the cache, do not grow
with the context. Over several blocks of keys the softmax runs on: FlashAttention-2,
arXiv:2307.08691.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache

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
from ..metal_kernels.paged_attention import AttentionCall, Softmax, capped, gathered_attention
from ..metal_kernels.variants import ReadyFor
from .inputs import Ints, QuerySegment, Segments, StepMetadata, ints
from .paged import AttentionPart, PagedLayer, Prepared, Runs, TailPlace
from .pages import AttentionWindow, PageGroup

FUSED_DIMS = frozenset({64, 72, 80, 96, 128})  # of keys and values both
QUERY_BLOCK = 128
KEY_BLOCK = 2048
BLOCK_BYTES = 1 << 25  # gathered together for a layer, where more than one segment is
LOWEST = -1e30  # a peak before anything was seen
HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen

KeysValues = tuple[mx.array, mx.array]
Read = Callable[[int, int, mx.array | None], KeysValues]  # keys from, to; not before this is there


class AttentionBackend:
    """Attention of a layer group: through kernels as far as they are ready, else in plain MLX.

    Args:
        token_bytes: of a token's keys and values in one layer, as plain MLX attends to them.
        ready: of all layers of the group; asked in each step, since kernels may become ready later.
        tiles: some layer has a kernel for prefill chunks, over pages alone.
    """

    def __init__(
        self, token_bytes: int, ready: Sequence[ReadyFor] = (), *, tiles: bool = False
    ) -> None:
        self._token_bytes = token_bytes
        self._ready = ready
        self._tiles = tiles

    def prepare(
        self, metadata: StepMetadata, group: PageGroup, number: int, place: TailPlace
    ) -> Prepared:
        """Prepare one step.

        Args:
            metadata: of the step.
            group: of the layers.
            number: which of the page tables is the group's.
            place: where tokens go in tails.
        """
        short: list[tuple[Ints, AttentionPart]] = []
        for segments in metadata.short:
            if self._has_kernel(segments, metadata):
                short.append(kernel_part(segments, metadata, group, number))
            else:
                short += short_parts(segments, metadata, group, number, self._token_bytes)
        chunks, tiles = chunks_of(metadata, group, number), None
        if self._tiles and chunks and all(chunk.spans is None for chunk in chunks):
            tiles = tiled_part(metadata.long, group, number)
        return Prepared(metadata, number, place, short, chunks, tiles)

    def _has_kernel(self, segments: Segments, metadata: StepMetadata) -> bool:
        """Whether all layers have a kernel for short segments."""
        if metadata.spans_of(int(segments.rows[0]), segments.num_tokens) is not None:
            return False
        answers = [ready(segments.width) for ready in self._ready]  # asks them all
        return len(answers) > 0 and all(answers)


# -- kernels ---------------------------------------------------------------------------------------


class OnMetal:
    """Rows of a step that attend together through a kernel: one dispatch, two where they are split.

    Layers of the same sizes share the plan and the launches.

    Args:
        rows: of the step's flat list; None: all.
        segments: of these rows, one after another.
        group: of the layers.
        number: which of the page tables is the group's.
        tiles: prefill chunks, which are written to pages before they attend.
    """

    __slots__ = ("_calls", "_group", "_number", "_plans", "_segments", "_tiles", "rows")

    def __init__(
        self,
        rows: slice | None,
        segments: Segments,
        group: PageGroup,
        number: int,
        *,
        tiles: bool = False,
    ) -> None:
        self.rows = rows
        self._segments, self._group, self._number, self._tiles = segments, group, number, tiles
        self._calls: dict[Hashable, AttentionCall] = {}
        self._plans: dict[tuple[int, ...], AttentionPlan] = {}

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (N, heads, D) -> what they see, (N, heads * V)."""
        has_sinks = softmax.sinks is not None
        sizes = layer.form, queries.shape, softmax.scale, has_sinks, softmax.soft_cap
        call = self._calls.get(sizes)
        if call is None:
            call = self._calls[sizes] = layer.kernel(queries, self._plan(layer, queries), softmax)
        return call(queries, layer.kernel_arrays(), softmax.sinks)[0]

    def _plan(self, layer: PagedLayer, queries: mx.array) -> AttentionPlan:
        """The plan for a layer and its queries."""
        segments, (_, num_heads, dim) = self._segments, queries.shape
        if self._tiles:
            kv_heads = len(layer.keys.pages[0])
            sizes = tile_sizes(num_heads, kv_heads, dim, layer.values.dim)
        else:
            sizes = {"kv_heads": layer.plan_heads(num_heads, segments.width)}
        key = tuple(sizes.values())
        if key not in self._plans:
            planner = segments.memoised(("plan", self._number, key), lambda: self._planner(sizes))
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
        """The page table; one without a window does not change while the segments do not."""
        segments, number = self._segments, self._number
        if self._group.window.size is not None:
            return page_table(segments.sealed_pages(number))
        return segments.memoised(
            ("pages", number), lambda: page_table(segments.sealed_pages(number))
        )


def kernel_part(
    short: Segments, metadata: StepMetadata, group: PageGroup, number: int
) -> tuple[Ints, OnMetal]:
    """The rows of short segments, and how they attend together."""
    count, first = short.num_tokens, int(short.rows[0])
    rows = short.memoised("flat rows", lambda: first + np.arange(count, dtype=np.int32))
    own = None if count == len(metadata.positions) else slice(first, first + count)
    return rows, OnMetal(own, short, group, number)


def tiled_part(long: Sequence[QuerySegment], group: PageGroup, number: int) -> OnMetal:
    """Prefill chunks, one after another in the flat list, attend in tiles, over pages."""
    some, size = Segments.of(long), group.page_size
    stops = some.starts + some.counts
    some = some.sealed_to(-(-stops // size) * size)  # they are written before they attend
    rows = slice(long[0].row, long[-1].row + long[-1].num_tokens)
    return OnMetal(rows, some, group, number, tiles=True)


# -- short segments in plain MLX -------------------------------------------------------------------


def short_parts(
    segments: Segments, metadata: StepMetadata, group: PageGroup, number: int, token_bytes: int
) -> list[tuple[Ints, AttentionPart]]:
    """Short segments in parts of like length: their rows, and how they attend.

    Args:
        segments: of the step.
        metadata: of the step.
        group: of the layers.
        number: which of the page tables is the group's.
        token_bytes: of a token's keys and values in one layer, as they are attended to.
    """
    blocks = _blocks(segments, group, number, token_bytes)
    if len(blocks) == 1:
        return [gathered_part(segments, metadata, group, number)]
    parts = segments.memoised(
        ("parts", *[block.tobytes() for block in blocks]),
        lambda: [segments.some(block) for block in blocks],
    )
    together = [some.at(segments.starts[block]) for some, block in zip(parts, blocks, strict=True)]
    return [gathered_part(some, metadata, group, number) for some in together]


def _blocks(
    segments: Segments, group: PageGroup, number: int, token_bytes: int
) -> list[NDArray[np.int64]]:
    """Which of the segments are gathered together."""

    def blocks() -> list[NDArray[np.int64]]:
        pages = num_visible(segments, group.window, group.page_size)
        return gather_blocks(pages, BLOCK_BYTES // (token_bytes * group.page_size))

    if group.window.size is None:  # all sealed pages are seen
        return segments.memoised(("blocks", number), blocks)
    return blocks()


def num_visible(short: Segments, window: AttentionWindow, page_size: int) -> Ints:
    """(B,) sealed pages of which each segment sees anything."""
    pages = short.sealed // page_size
    if window.size is None:
        return pages
    first = window.lowest_of(short.starts) // page_size
    kept = np.minimum(window.kept_pages(page_size), first)
    return np.minimum(kept, pages) + np.maximum(pages - first, 0)


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


@dataclass(frozen=True, slots=True)
class Gathered:
    """B short segments that attend together over gathered pages and tails.

    Attributes:
        rows: (B * Q,) flat rows of the queries; None: all of the step, in order.
        shape: (B, Q).
        unpad: (T',) from the padded (B * Q) outputs back to flat order; None: nothing is padded.
        slots: (B,) of the tails.
        tail_mask: (B, 1, Q, R) additive.
        page_ids: (B, n) of the pages that are gathered; None: no segment sees any.
        mask: (B, 1, 1 or Q, n * page_size) additive; None: all of the pages is seen.
    """

    rows: slice | mx.array | None
    shape: tuple[int, int]
    unpad: mx.array | None
    slots: mx.array | slice
    tail_mask: mx.array
    page_ids: mx.array | None
    mask: mx.array | None

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (B * Q, heads, D) -> what the segments see, (T', heads * V)."""
        pages = None
        if self.page_ids is not None:
            # Without the dependency all layers might gather first.
            ids = mx.depends([self.page_ids], [queries])[0]
            keys = layer.keys.read_pages(ids, layer.page_size).transpose(1, 0, 3, 2)
            pages = keys, layer.values.read_pages(ids, layer.page_size).swapaxes(0, 1)
        outputs = gathered_attention(  # (B, Q, heads, V)
            mx.unflatten(queries, 0, self.shape),
            pages,
            self.mask,
            *layer.read_tails(self.slots),
            self.tail_mask,
            softmax,
        )
        flat = outputs.reshape(self.shape[0] * self.shape[1], -1)
        return flat if self.unpad is None else flat[self.unpad]


def gathered_part(
    segments: Segments, metadata: StepMetadata, group: PageGroup, number: int
) -> tuple[Ints, Gathered]:
    """The rows of segments, and how they attend: each sees a page at least, or none does."""
    step, rows, unpad, slots, tail_begins = segments.memoised(
        "queries", lambda: _queries(segments, group.page_size)
    )
    positions = segments.starts[:, None] + step  # (B, Q)
    whole = positions.size == len(metadata.positions) and unpad is None
    spans = None if metadata.spans is None else metadata.spans[:, segments.rows[:, None] + step]
    part = Gathered(
        None if whole else rows,
        positions.shape,
        unpad,
        slots,
        _tail_mask(segments, positions, tail_begins, spans, group),
        *_seen_pages(segments, positions, group, number),
    )
    return segments.tokens()[0], part


def _queries(
    short: Segments, page_size: int
) -> tuple[Ints, mx.array | slice, mx.array | None, mx.array | slice, Ints]:
    """Where queries and tails of segments are, whatever their positions.

    Returns:
        (B, Q) the token of its segment at each place: the last one is repeated; `rows`, `unpad` and
        `slots` as of `Gathered`; and rows (B, 1, 1) of `_ring_masks`, less the positions.
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
    segments: Segments, positions: Ints, group: PageGroup, number: int
) -> tuple[mx.array | None, mx.array | None]:
    """Ids (B, n) of the pages that any query sees, and their mask (B, 1, 1 or Q, n * page_size).

    A span lies in the step that computes it, and so never in a page of an earlier step.
    """
    window, size = group.window, group.page_size
    if window.size is None:
        if not segments.sealed.any():
            return None, None
        return segments.memoised(("gather", number), lambda: _all_pages(segments, number, size))
    if not num_visible(segments, window, size).any():
        return None, None
    return _window_pages(segments, number, window, size, positions)


def _all_pages(short: Segments, number: int, page_size: int) -> tuple[mx.array, mx.array | None]:
    """Ids (B, n) of all sealed pages, and the mask (B, 1, 1, n * page_size) of the padding."""
    ids, real = _padded(short.sealed_pages(number))
    if real.all():
        return mx.array(ids), None
    mask = np.repeat(additive(real), page_size, axis=1)
    return mx.array(ids), mx.array(mask[:, None, None])


def _window_pages(
    short: Segments, number: int, window: AttentionWindow, page_size: int, positions: Ints
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
        tables.append(np.asarray(row[number].numbers_before(sealed))[seen])
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


# -- prefill chunks in plain MLX -------------------------------------------------------------------


def chunks_of(metadata: StepMetadata, group: PageGroup, number: int) -> list["Chunk"]:
    """The prefill chunks of a step."""
    return [Chunk.of(segment, metadata, group.window, number) for segment in metadata.long]


Block = tuple[slice, slice, mx.array | str]
"""Some rows of a chunk, the keys that they can see among those that the chunk reads, and which of
these: "causal", or bool (queries, keys)."""

Running = tuple[mx.array, mx.array, mx.array]
"""A softmax over the keys so far, of H heads and some rows of each, float32: outputs (H, rows, V)
that are not divided by the totals, peaks (H, rows, 1) and totals (H, rows, 1)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill chunk: where its tokens go, and what they see.

    Attributes:
        rows: of the step's flat list.
        writes: page slots of the new tokens.
        reads: page slots of all that any of them sees.
        start: position of the first token.
        ranges: positions of `reads`, in order.
        window: of the group.
        spans: (2, n) positions from, and up to, that each token sees besides; None: it sees none.
    """

    rows: slice
    writes: list[tuple[int, int]]
    reads: list[tuple[int, int]]
    start: int
    ranges: Sequence[tuple[int, int]]
    window: AttentionWindow
    spans: Ints | None = None
    _blocks: list[Block] = field(default_factory=list)  # of queries, where keys are one block

    @staticmethod
    def of(
        segment: QuerySegment, metadata: StepMetadata, window: AttentionWindow, number: int
    ) -> "Chunk":
        """The chunk of a segment in the group `number`."""
        table = segment.tables[number]
        # What of its first page is there already was copied into the page as well as into the tail.
        whole = segment.start - segment.start % table.page_size
        assert segment.sealed == whole, "a full page is not sealed"
        ranges = window.ranges(segment.start, segment.stop)
        return Chunk(
            rows=slice(segment.row, segment.row + segment.num_tokens),
            writes=table.runs(segment.start, segment.stop),
            reads=[run for part in ranges for run in table.runs(*part)],
            start=segment.start,
            ranges=ranges,
            window=window,
            spans=metadata.spans_of(segment.row, segment.num_tokens),
        )

    @property
    def num_keys(self) -> int:
        """Tokens that any query sees."""
        return sum([stop - start for start, stop in self.ranges])

    @property
    def sees_all_before(self) -> bool:
        """Whether each token sees exactly itself and all tokens before it."""
        return self.window.size is None and self.spans is None

    def attend(self, layer: PagedLayer, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (n, heads, D) -> what they see, (n, heads * V)."""

        def read(start: int, stop: int, after: mx.array | None) -> KeysValues:
            runs = cut_runs(self.reads, start, stop)
            keys = layer.keys.read_runs(runs, after)
            return keys, layer.values.read_runs(runs, after=keys)  # never both half decoded

        dims = queries.shape[-1], layer.values.dim
        found = self.attend_to(queries.swapaxes(0, 1), read, dims, softmax)
        return found.swapaxes(0, 1).flatten(1)

    def attend_to(
        self, queries: mx.array, read: Read, dims: tuple[int, int], softmax: Softmax
    ) -> mx.array:
        """Queries (heads, n, D) of the chunk over what it reads.

        Args:
            queries: of the chunk.
            read: tokens from, to, counted in `reads`, and what must be there before -> their keys
                (H, S, D) and values (H, S, V).
            dims: D and V.
            softmax: of the layer.

        Returns:
            (heads, n, V).
        """
        scale, sinks, soft_cap = softmax
        if (
            self.sees_all_before
            and soft_cap is None
            and mx.metal.is_available()
            and is_fused(*dims)
        ):
            keys, values = read(0, self.num_keys, None)
            found = mx.fast.scaled_dot_product_attention(
                queries[None], keys[None], values[None], scale=scale, mask="causal", sinks=sinks
            )
            return found[0]
        if self.num_keys <= KEY_BLOCK and soft_cap is None:
            return self._over_one_block(queries, read, scale, sinks)
        return self._over_blocks(queries * scale, read, sinks, soft_cap)

    def _over_one_block(
        self, queries: mx.array, read: Read, scale: float, sinks: mx.array | None
    ) -> mx.array:
        keys, values = read(0, self.num_keys, None)
        if not self._blocks:
            self._blocks.extend(self._query_blocks())
        outputs: list[mx.array] = []
        for rows, columns, mask in self._blocks:
            some = queries[None, :, rows]
            some = mx.depends(some, outputs[-1]) if outputs else some  # one block's scores only
            seen = keys[None, :, columns], values[None, :, columns]
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    some, *seen, scale=scale, mask=mask, sinks=sinks
                )
            )
        return outputs[0][0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)[0]

    def _over_blocks(
        self, queries: mx.array, read: Read, sinks: mx.array | None, soft_cap: float | None
    ) -> mx.array:
        """Each block of keys is read once, for all queries; `queries` are scaled."""
        num_heads, count, _ = queries.shape
        places = [
            slice(first, min(first + QUERY_BLOCK, count)) for first in range(0, count, QUERY_BLOCK)
        ]
        states: list[Running | None] = [None] * len(places)
        positions, after = self._key_positions(), None
        for start in range(0, len(positions), KEY_BLOCK):
            own = positions[start : start + KEY_BLOCK]
            keys, values = read(start, start + len(own), after)
            for i, place in enumerate(places):
                seen = self._seen(place, own)
                if seen is False:
                    continue
                state = states[i] or _begun(queries[:, place], values, sinks)
                some = queries[:, place] if after is None else mx.depends(queries[:, place], after)
                states[i] = state = _joined(state, some, keys, values, seen, soft_cap)
                after = state[0]
        found = [state[0] / state[2] for state in states if state is not None]
        return mx.concatenate(
            [some.reshape(num_heads, -1, some.shape[-1]) for some in found], axis=1
        ).astype(queries.dtype)

    def _key_positions(self) -> Ints:
        """(S,) of what is read."""
        return np.concatenate([np.arange(*part, dtype=np.int32) for part in self.ranges])

    def _visible(self, place: slice, keys: Ints) -> NDArray[np.bool_]:
        """(queries, keys) which of some queries see which keys (S,), by position."""
        queries = np.arange(self.start + place.start, self.start + place.stop, dtype=np.int32)
        spans = None if self.spans is None else self.spans[:, place, None]
        return self.window.sees(queries[:, None], keys[None], spans)

    def _seen(self, place: slice, keys: Ints) -> mx.array | bool:
        """Which of some queries see which keys: (queries, keys) bool, or all, or none of them."""
        first, last = self.start + place.start, self.start + place.stop - 1
        if self.window.size is None and keys[-1] <= first:
            return True
        if self.spans is None and keys[0] > last:
            return False
        seen = self._visible(place, keys)
        return mx.array(seen) if seen.any() else False

    def _query_blocks(self) -> list[Block]:
        """Blocks of queries with the keys that they can see."""
        keys, count = self._key_positions(), self.rows.stop - self.rows.start
        blocks = []
        for first in range(0, count, QUERY_BLOCK):
            queries = slice(first, min(first + QUERY_BLOCK, count))
            if self.spans is None:  # an old end leaves, a new one comes
                edges = ints([self.start + queries.start, self.start + queries.stop - 1])
                seen = self.window.sees(edges[:, None], keys[None])
            else:
                seen = self._visible(queries, keys)
            columns = np.flatnonzero(seen.any(axis=0))
            low, high = int(columns[0]), int(columns[-1]) + 1
            mask: mx.array | str = "causal"
            if self.spans is not None or not seen[-1, low:high].all():
                mask = mx.array(self._visible(queries, keys[low:high]))
            blocks.append((queries, slice(low, high), mask))
        return blocks


def is_fused(key_dim: int, value_dim: int) -> bool:
    """Whether MLX on Metal attends to keys and values of these dims without keeping scores."""
    return key_dim == value_dim and key_dim in FUSED_DIMS


def cut_runs(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """The runs that hold tokens [start, stop) of those in `runs`, counted one after another."""
    found, first = [], 0
    for low, high in runs:
        begin, end = max(low, low + start - first), min(high, low + stop - first)
        if begin < end:
            found.append((begin, end))
        first += high - low
    return found


def _begun(queries: mx.array, values: mx.array, sinks: mx.array | None) -> Running:
    """The running softmax before any key; a sink logit is in it already."""
    num_heads, count, _ = queries.shape
    kv_heads, _, dim = values.shape
    shape = kv_heads, num_heads // kv_heads * count, 1
    outputs = mx.zeros((*shape[:2], dim), mx.float32)
    if sinks is None:
        return outputs, mx.full(shape, LOWEST), mx.zeros(shape, mx.float32)
    peaks = mx.repeat(sinks.astype(mx.float32), count).reshape(shape)
    return outputs, peaks, mx.ones(shape, mx.float32)


def _joined(
    state: Running,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: mx.array | bool,
    soft_cap: float | None,
) -> Running:
    """The running softmax after more keys.

    Queries (heads, n, D), keys (H, S, D), values (H, S, V).
    """
    kv_heads, num_keys, _ = keys.shape
    _, count, dim = queries.shape
    outputs, old_peaks, old_totals = state
    scores = queries.reshape(kv_heads, -1, dim) @ keys.swapaxes(1, 2)
    scores = (scores if soft_cap is None else capped(scores, soft_cap)).astype(mx.float32)
    if isinstance(seen, mx.array):
        by_query = scores.reshape(kv_heads, -1, count, num_keys)
        scores = mx.where(seen, by_query, -mx.inf).reshape(scores.shape)
    peaks = mx.maximum(old_peaks, scores.max(axis=-1, keepdims=True))
    weights, fade = mx.exp(scores - peaks), mx.exp(old_peaks - peaks)
    added = weights.astype(values.dtype) @ values
    totals = old_totals * fade + weights.sum(axis=-1, keepdims=True)
    # Else totals wait for the last block, and the weights of all blocks with them.
    return mx.depends(outputs * fade + added, totals), peaks, totals
