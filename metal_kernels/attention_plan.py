"""Arguments of a step's attention kernels: tokens of each sequence, and the threadgroup of each.

A plan is made once for each step and layer group, and all layers of the group use it. A *span* of a
plan is the query tokens that one threadgroup takes: all tokens of a sequence for decode and
verification, a tile of consecutive tokens for a prompt. Prompts attend so where MLX has no fused
attention (head dims above 128 for more than 8 queries), and where keys and values are stored in
codes. One launch then serves the prompts of several sequences. Nothing is gathered, and no score
leaves a threadgroup. The memory of a launch, beside its outputs, does not grow with the context.
Algorithm: FlashAttention-2, arXiv:2307.08691.

Knows no keys, no values, no kernel. B = sequences, BLOCK = 16 tokens that kernels take together.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .chips import gpu_cores
from .launch import MIN_NUMBERS

Ints = NDArray[np.int32]
Numbers: TypeAlias = "Ints | array[int]"  # of int32 both

BLOCK = 16
MAX_QUERIES = 8
MIN_ITEM_BLOCKS = 16  # fewer tokens do not pay for the partials that they leave behind,
FEW_ITEM_BLOCKS = 2  # unless cores would stand idle
ITEMS_PER_CORE = 8
MIN_ITEMS_PER_CORE = 2
NUM_SIZES = NUM_FIELDS = 8  # PLAN_SIZES and SPAN_FIELDS in paged_spans.h
START, STOP, FIRST_ITEM = 1, 2, 7  # fields of a span
NUM_WORK, TABLE = 4, 3  # of an item: WORK_FIELDS in paged_spans.h
ENDLESS = 2**30  # a window that hides nothing
TILES_PER_CORE = 2  # threadgroups of prompts below which long tiles are split
MAX_PARTIAL_BYTES = 2 << 20  # that split tiles may leave to be reduced


class AttentionPlan(NamedTuple):
    """Arrays for the kernels, and what Python needs to launch them.

    All but the page table is one array: each costs the host something in every layer.
    """

    numbers: mx.array  # int32 as `StepPlan` in paged_spans.h reads them: sizes, spans, work
    pages: mx.array  # (B, max_pages) int32, -1: released
    num_spans: int
    num_items: int
    max_queries: int  # of a span
    num_queries: int  # of all
    is_prefill: bool  # spans are tiles of prompts

    @property
    def is_split(self) -> bool:
        """Whether a span has several items, so that partials must be reduced."""
        return self.num_items > self.num_spans

    @property
    def sizes(self) -> Ints:
        """(8,) page_size, window, sinks, max_pages, max_queries, where the work list begins."""
        return np.array(self.numbers)[:NUM_SIZES]

    @property
    def tables(self) -> Ints:
        """(spans,) row of the page table of each span."""
        numbers = np.array(self.numbers)
        work = numbers[numbers[5] :].reshape(-1, NUM_WORK)
        first_items: Ints = self.spans[:, FIRST_ITEM]
        tables: Ints = work[first_items, TABLE]
        return tables

    @property
    def spans(self) -> Ints:
        """(spans, 8) fields of `Span` in paged_spans.h."""
        stop = NUM_SIZES + self.num_spans * NUM_FIELDS
        return np.array(self.numbers)[NUM_SIZES:stop].reshape(-1, NUM_FIELDS)


class AttentionPlanner:
    """Plans the attention of consecutive query tokens of each sequence, step by step.

    The flat list has the queries of the first sequence first, then those of the second. From one
    step to the next only positions change, and now and then the visible blocks. Everything else is
    computed once.

    Args:
        counts: (B,) query tokens; at most 8, unless there are tiles.
        sealed: (B,) positions that lie in pages, whole pages; the rest lies in the tail. Queries in
            tiles see nothing behind them.
        slots: (B,) of the tails.
        page_size: tokens a page, a multiple of 16.
        window: positions up to a query that it sees; None: all.
        sinks: positions at the front that every query sees beside its window.
        cores: of the GPU; None: those of this machine.
        item_blocks: blocks of 16 tokens that one threadgroup takes at most; None: from the
            lengths and cores.
        tile_queries, partial_bytes: see `tile_sizes`; 0: there are no tiles.
    """

    def __init__(
        self,
        *,
        counts: Ints,
        sealed: Ints,
        slots: Ints,
        page_size: int,
        kv_heads: int,
        window: int | None = None,
        sinks: int = 0,
        cores: int | None = None,
        item_blocks: int | None = None,
        tile_queries: int = 0,
        partial_bytes: int = 0,
    ) -> None:
        assert page_size % BLOCK == 0, "a block never crosses a page"
        assert not (sealed % page_size).any(), "pages are sealed whole"
        assert counts.min() >= 1
        assert tile_queries or counts.max() <= MAX_QUERIES
        self._max_queries = most = tile_queries or int(counts.max())
        self._num_queries, self._partial_bytes = int(counts.sum()), partial_bytes
        num_spans = -(-counts // most)
        self._seq = seq = np.repeat(np.arange(len(counts)), num_spans)  # of each span
        index = np.arange(len(seq)) - (np.cumsum(num_spans) - num_spans)[seq]
        self._first = (index * most).astype(np.int32)  # queries of the sequence before the span
        self._counts = np.minimum(counts[seq] - self._first, most)
        self._rows = (np.cumsum(counts) - counts)[seq] + self._first
        self._sealed, self._slots = sealed[seq], slots[seq]
        self._page_size, self._window, self._sinks = page_size, window, sinks
        self._kv_heads, self._cores = kv_heads, cores or gpu_cores()
        self._item_blocks, self._is_prefill = item_blocks, tile_queries > 0
        self._seen: tuple[object, ...] = ()  # what the numbers of the step before follow from
        self._order: NDArray[np.int64] = np.arange(len(seq))
        self._numbers = np.zeros(0, np.int32)
        self._num_items = 0

    def __call__(self, starts: Ints, pages: mx.array) -> AttentionPlan:
        """Of one step.

        Args:
            starts: (B,) position of the first query; the last one is the last token there is.
            pages: (B, max_pages) the page of every page number up to `sealed`, from `page_table`.
        """
        starts = starts[self._seq] + self._first
        stops = starts + self._counts
        ends = np.minimum(stops, self._sealed) if self._is_prefill else stops
        blocks = visible_blocks(starts, ends, self._window, self._sinks)
        max_pages = pages.shape[1]
        seen = (max_pages, *[field.tobytes() for field in blocks])
        if seen != self._seen:
            self._seen = seen
            self._work_out(max_pages, *blocks)
        numbers = self._numbers.copy()
        spans = numbers[NUM_SIZES : NUM_SIZES + NUM_FIELDS * len(starts)].reshape(-1, NUM_FIELDS)
        spans[:, START], spans[:, STOP] = starts[self._order], stops[self._order]
        return AttentionPlan(
            mx.array(numbers),
            pages,
            len(starts),
            self._num_items,
            self._max_queries,
            self._num_queries,
            self._is_prefill,
        )

    def _work_out(self, max_pages: int, sink_blocks: Ints, gaps: Ints, num_blocks: Ints) -> None:
        """The plan's numbers except positions, and how many items there are.

        Tiles with the most keys come first.
        """
        if self._is_prefill:
            self._order = np.argsort(-num_blocks, kind="stable")
        order = self._order
        first_items, work = share_blocks(num_blocks[order], self._most_blocks(num_blocks))
        work[:, TABLE] = self._seq[order][work[:, 0]]
        positions = np.zeros_like(self._sealed)
        fields = self._rows, positions, positions, self._sealed, self._slots, sink_blocks, gaps
        spans = np.stack([*(field[order] for field in fields), first_items], axis=1)
        reach = (ENDLESS, 0) if self._window is None else (self._window, self._sinks)
        sizes = self._page_size, *reach, max_pages, self._max_queries
        self._numbers, self._num_items = plan_numbers(sizes, spans, work), len(work)

    def _most_blocks(self, num_blocks: Ints) -> int:
        if self._item_blocks is not None:
            return self._item_blocks
        if not self._is_prefill:
            return blocks_per_item(num_blocks, self._kv_heads, self._cores)
        return blocks_per_tile(num_blocks, self._kv_heads, self._partial_bytes, self._cores)


def plan_numbers(sizes: Sequence[int], spans: Ints, work: Ints) -> Ints:
    """A plan as `StepPlan` in paged_spans.h reads it.

    Args:
        sizes: page size, window, sinks, pages of a sequence at most, queries of a span at most.
        spans: (spans, 8) fields of `Span`.
        work: (items, 4).
    """
    stop = NUM_SIZES + (len(spans) + 1) * NUM_FIELDS
    numbers = np.zeros(stop + work.size, np.int32)
    numbers[: len(sizes)], numbers[len(sizes)] = sizes, stop
    numbers[NUM_SIZES : stop - NUM_FIELDS] = spans.ravel()
    numbers[stop - 1] = len(work)  # one more span ends the items
    numbers[stop:] = work.ravel()
    return numbers


def page_table(tables: Sequence[Numbers]) -> mx.array:
    """(B, max_pages), at least 8 of them; the page of every page number, -1: released."""
    entries, lengths = joined(tables)
    width = max(MIN_NUMBERS, int(lengths.max()))
    pages = np.full((len(tables), width), -1, np.int32)
    pages[np.arange(width) < lengths[:, None]] = entries
    return mx.array(pages)


def joined(rows: Sequence[Numbers]) -> tuple[Ints, Ints]:
    """Entries (N,) of rows of int32, one row after another, and how many each has (B,)."""
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    entries = np.frombuffer(b"".join(rows), np.int32)  # type: ignore[arg-type]
    assert len(entries) == lengths.sum()
    return entries, lengths


def visible_blocks(
    starts: Ints, stops: Ints, window: int | None, sinks: int
) -> tuple[Ints, Ints, Ints]:
    """(B,) each: blocks of sinks at the front, blocks that no query sees, then blocks seen."""
    ends = (stops + (BLOCK - 1)) // BLOCK
    if window is None:
        zeros = _zeros(len(starts))
        return zeros, zeros, ends
    first = np.maximum(starts - window + 1, 0) // BLOCK
    sink_blocks = np.minimum(-(-sinks // BLOCK), first).astype(np.int32)
    return sink_blocks, first - sink_blocks, sink_blocks + ends - first


@lru_cache(16)
def _zeros(count: int) -> Ints:
    return np.zeros(count, np.int32)


def blocks_per_item(num_blocks: Ints, kv_heads: int, cores: int) -> int:
    """Blocks that one threadgroup takes at most, so that there are 8 threadgroups for each core.

    If there are many sequences and heads, each sequence is one item, and nothing is reduced. If
    there are few, or one is much longer than the rest, it is split. Short contexts are split into 2
    threadgroups for each core, unless nothing would have to be reduced.
    """
    total = int(num_blocks.sum()) * kv_heads
    wanted = -(-total // (ITEMS_PER_CORE * cores))
    if wanted >= MIN_ITEM_BLOCKS or num_blocks.max() <= MIN_ITEM_BLOCKS:
        return max(wanted, MIN_ITEM_BLOCKS)
    few = max(total // (MIN_ITEMS_PER_CORE * cores), FEW_ITEM_BLOCKS)
    return min(few, MIN_ITEM_BLOCKS)


def share_blocks(num_blocks: Ints, item_blocks: int) -> tuple[Ints, Ints]:
    """First item (B,) of each sequence, and the items (items, 4): it, first, stop, it once more.

    The items of a sequence are as equal as blocks allow.
    """
    num_items = -(-num_blocks // item_blocks)
    first_items = np.cumsum(num_items) - num_items
    work = np.zeros((int(num_items.sum()), NUM_WORK), np.int32)
    work[:, 0] = work[:, TABLE] = np.repeat(np.arange(len(num_blocks)), num_items)
    index = np.arange(len(work)) - first_items[work[:, 0]]  # within the sequence
    blocks, items = num_blocks[work[:, 0]], num_items[work[:, 0]]
    work[:, 1] = index * blocks // items
    work[:, 2] = (index + 1) * blocks // items
    return first_items.astype(np.int32), work


def blocks_per_tile(num_blocks: Ints, kv_heads: int, partial_bytes: int, cores: int) -> int:
    """Blocks of a tile that one threadgroup takes at most.

    If there are too few tiles for the GPU, they are split, as long as partial outputs stay small.

    Args:
        kv_heads, cores: see `AttentionPlanner`.
        partial_bytes: of one item's partial outputs, all heads together.
    """
    whole = int(num_blocks.max())
    wanted = TILES_PER_CORE * cores // kv_heads
    allowed = MAX_PARTIAL_BYTES // partial_bytes
    spare = min(wanted, allowed) - len(num_blocks)  # tiles may have one item more than their share
    if spare < 1:
        return whole
    return max(-(-int(num_blocks.sum()) // spare), MIN_ITEM_BLOCKS)


def tile_sizes(num_heads: int, kv_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Arguments of `AttentionPlanner` for prompts, which attend in tiles."""
    count = tile_queries(num_heads // kv_heads, key_dim=key_dim, value_dim=value_dim)
    assert count > 0, "a tile has no room for the query heads of one token"
    partial_bytes = num_heads * count * (value_dim + 2) * 4
    return {"kv_heads": kv_heads, "tile_queries": count, "partial_bytes": partial_bytes}


def tile_queries(group: int, *, key_dim: int, value_dim: int) -> int:
    """Query tokens of a tile, for `group` query heads per KV head."""
    return prefill_shape(key_dim=key_dim, value_dim=value_dim).rows // group


# -- threadgroups ---------------------------------------------------------------------------------

FRAGMENT_ROWS = 8
FRAGMENTS = 32  # of outputs that a SIMD group may hold: 64 registers of each lane,
MAX_OWN_ROWS = 3  # of 8 rows each: scores and queries take registers too
SHARED_FRAGMENTS = 16  # the same where queries take registers too
STREAMS = 4  # SIMD groups that take blocks in turn
PAIRED_TEAMS = 4  # more than these many sets of rows have one SIMD group each
MAX_TILE_BYTES = 16_384  # keys and values together
LANES = 32
# What the smallest chips have, and what a kernel may take of it: 448 threads of 110 registers.
REGISTER_BUDGET = 448 * 110
THREADGROUP_BUDGET = 16_384  # bytes, so that two threadgroups share a core
WHOLE_DIM = 256  # larger vectors are halved between two SIMD groups
PREFILL_GROUPS = 8  # SIMD groups of a tile of a prompt


@dataclass(frozen=True, slots=True)
class Shape:
    """A threadgroup: how many SIMD groups, and which of them has which rows, tokens and numbers."""

    fragments: int  # of 8 query rows, of one SIMD group
    simd_groups: int
    partners: int  # SIMD groups with the same rows and other tokens
    shares: bool  # all read the same tiles
    halves: int = 1  # SIMD groups with the same rows and other numbers of keys and values

    @property
    def threads(self) -> int:
        return self.simd_groups * LANES

    @property
    def rows(self) -> int:
        return self.simd_groups // (self.partners * self.halves) * self.fragments * FRAGMENT_ROWS


@cache
def threadgroup_shape(num_rows: int, *, key_dim: int, value_dim: int, itemsize: int) -> Shape:
    """The threadgroup that serves `num_rows` query rows and loads each key and value once.

    While all rows fit into the registers of one SIMD group, every SIMD group has all rows and its
    own tokens. Otherwise SIMD groups share tiles in threadgroup memory. If there are more rows than
    `most_rows`, each threadgroup takes a block of rows, and loads keys and values again.
    """
    fragments = -(-num_rows // FRAGMENT_ROWS)
    if fragments <= MAX_OWN_ROWS and fragments * value_dim <= FRAGMENTS * FRAGMENT_ROWS:
        return Shape(fragments, STREAMS, STREAMS, shares=False)
    most = most_rows(key_dim, value_dim)
    num_blocks = -(-num_rows // most)
    fragments = -(-fragments // num_blocks)
    if max(key_dim, value_dim) > WHOLE_DIM:
        return Shape(1, fragments * 2, 1, shares=True, halves=2)
    own_fragments = max(1, SHARED_FRAGMENTS * FRAGMENT_ROWS // value_dim)
    teams = -(-fragments // own_fragments)
    half_tile = BLOCK * (key_dim + value_dim) * itemsize > MAX_TILE_BYTES
    partners = 1 if half_tile or teams > PAIRED_TEAMS else 2
    return Shape(own_fragments, teams * partners, partners, shares=True)


def most_rows(key_dim: int, value_dim: int) -> int:
    """Query rows of a threadgroup at most: 448 threads of 110 registers, or as much in all."""
    if max(key_dim, value_dim) > WHOLE_DIM:
        return 32
    return 128 if value_dim <= 128 else 64


@cache
def prefill_shape(*, key_dim: int, value_dim: int) -> Shape:
    """The threadgroup that serves a tile of a prompt's query rows.

    It takes as many rows as registers hold. Keys and values are loaded once for all of them. If the
    head dim allows it, each fragment from threadgroup memory is multiplied with two fragments of
    rows.
    """
    if max(key_dim, value_dim) > WHOLE_DIM:
        return Shape(1, PREFILL_GROUPS, 1, shares=True, halves=2)
    return Shape(2 if value_dim <= 128 else 1, PREFILL_GROUPS, 1, shares=True)


def registers(
    shape: Shape, *, key_dim: int, value_dim: int, itemsize: int, codes: bool = False
) -> int:
    """32-bit registers that a lane needs at its peak: an estimate from the values in the source.

    It counts outputs, queries in registers, scores, fragments on their way, peaks, totals and
    positions of rows, and about 12 for addresses. A compiler may need more or fewer. If it needs
    more, the attribute `max_total_threads_per_threadgroup` makes it spill.

    Args:
        key_dim, value_dim: numbers of a key and of a value.
        itemsize: bytes of a number of a query.
        codes: keys and values are stored as codes: multiplied as such, with sums of queries and of
            biases beside them, or in tiles of 32 bits.
    """
    rows = shape.fragments
    kept = rows * value_dim // 4 // shape.halves + 3 * rows + 12
    if not shape.shares:
        keys = 4 * 8 * itemsize // 4 if key_dim % 64 == 0 else 4 * 4 * itemsize // 4
        sums = rows * (key_dim // 64 + value_dim // 64) + 4 * rows if codes else 0
        return kept + 4 * rows + keys + 2 * rows + 2 + sums
    queries = rows * key_dim // 8 // shape.halves * (2 * itemsize // 4)
    tile_tokens = 8 if shape.halves == 2 else 16
    if BLOCK * (key_dim + value_dim) * (4 if codes else itemsize) > MAX_TILE_BYTES:
        tile_tokens = 8
    scores = 2 * rows * tile_tokens // 8 // shape.partners
    return kept + queries + scores + 2 * rows + 2
