"""Arguments of a step's attention kernels: each sequence's tokens, and the threadgroup of each.

Made once a step and layer group, used by all its layers. Knows no keys, no values, no kernel.
B = sequences, BLOCK = 16 tokens, which kernels handle together.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
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


class AttentionPlan(NamedTuple):
    """Arrays for the kernels, and what Python needs to launch them.

    All but the page table is one array: each costs the host something in every layer.
    """

    numbers: mx.array  # int32 as `StepPlan` in paged_spans.h reads them: sizes, spans, work
    pages: mx.array  # (B, max_pages) int32, -1: released
    num_seqs: int
    num_items: int
    max_queries: int  # of a sequence
    num_queries: int  # of all
    is_prefill: bool = False  # each span is a tile of some sequence's queries

    @property
    def is_split(self) -> bool:
        """Whether a sequence has several items, so that partials must be reduced."""
        return self.num_items > self.num_seqs

    @property
    def sizes(self) -> Ints:
        """(8,) page_size, window, sinks, max_pages, max_queries, where the work list begins."""
        return np.array(self.numbers)[:NUM_SIZES]

    @property
    def tables(self) -> Ints:
        """(B,) row of the page table of each span."""
        numbers = np.array(self.numbers)
        work = numbers[numbers[5] :].reshape(-1, NUM_WORK)
        first_items: Ints = self.spans[:, FIRST_ITEM]
        found: Ints = work[first_items, TABLE]
        return found

    @property
    def spans(self) -> Ints:
        """(B, 8) fields of `Span` in paged_spans.h."""
        stop = NUM_SIZES + self.num_seqs * NUM_FIELDS
        return np.array(self.numbers)[NUM_SIZES:stop].reshape(-1, NUM_FIELDS)


class AttentionPlanner:
    """Plans the attention of 1 to 8 consecutive query tokens of each sequence, step by step.

    The flat list of queries has those of the first sequence first, then those of the second. From
    one step to the next only positions differ, and now and then the blocks that are seen: what
    follows from the rest is worked out once.

    Args:
        counts: (B,) query tokens.
        sealed: (B,) positions that lie in pages, whole pages; the rest lies in the tail.
        slots: (B,) of the tails.
        page_size: tokens a page, a multiple of 16.
        kv_heads: of a layer.
        window: positions up to a query that it sees; None: all.
        sinks: positions at the front that every query sees beside its window.
        cores: of the GPU; None: those of this machine.
        item_blocks: blocks of 16 tokens that one threadgroup takes at most; None: from the
            lengths and cores.
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
    ) -> None:
        assert page_size % BLOCK == 0, "a block never crosses a page"
        assert not (sealed % page_size).any(), "pages are sealed whole"
        assert counts.min() >= 1
        assert counts.max() <= MAX_QUERIES
        self._counts, self._sealed, self._slots = counts, sealed, slots
        self._rows = np.cumsum(counts) - counts
        self._max_queries, self._num_queries = int(counts.max()), int(counts.sum())
        self._page_size, self._window, self._sinks = page_size, window, sinks
        self._kv_heads, self._cores = kv_heads, cores or gpu_cores()
        self._item_blocks = item_blocks
        self._seen: tuple[object, ...] = ()  # what the numbers of the step before follow from
        self._numbers = np.zeros(0, np.int32)
        self._num_items = 0

    def __call__(self, starts: Ints, pages: mx.array) -> AttentionPlan:
        """Of one step.

        Args:
            starts: (B,) position of the first query; the last one is the last token there is.
            pages: (B, max_pages) the page of every page number up to `sealed`, from `page_table`.
        """
        stops = starts + self._counts
        blocks = visible_blocks(starts, stops, self._window, self._sinks)
        max_pages = pages.shape[1]
        seen = (max_pages, *[field.tobytes() for field in blocks])
        if seen != self._seen:
            self._numbers, self._num_items = self._worked_out(max_pages, *blocks)
            self._seen = seen
        numbers = self._numbers.copy()
        spans = numbers[NUM_SIZES : NUM_SIZES + NUM_FIELDS * len(starts)].reshape(-1, NUM_FIELDS)
        spans[:, START], spans[:, STOP] = starts, stops
        return AttentionPlan(
            mx.array(numbers),
            pages,
            len(starts),
            self._num_items,
            self._max_queries,
            self._num_queries,
        )

    def _worked_out(
        self, max_pages: int, sink_blocks: Ints, gaps: Ints, num_blocks: Ints
    ) -> tuple[Ints, int]:
        """The plan's numbers but for positions, and how many items there are."""
        item_blocks = self._item_blocks
        if item_blocks is None:
            item_blocks = blocks_per_item(num_blocks, self._kv_heads, self._cores)
        first_items, work = share_blocks(num_blocks, item_blocks)
        positions = np.zeros_like(self._sealed)
        spans = np.stack(
            [
                *(self._rows, positions, positions, self._sealed, self._slots),
                *(sink_blocks, gaps, first_items),
            ],
            axis=1,
        )
        reach = (ENDLESS, 0) if self._window is None else (self._window, self._sinks)
        sizes = self._page_size, *reach, max_pages, self._max_queries
        return plan_numbers(sizes, spans, work), len(work)


def plan_numbers(sizes: Sequence[int], spans: Ints, work: Ints) -> Ints:
    """A plan as `StepPlan` in paged_spans.h reads it.

    Args:
        sizes: page size, window, sinks, pages of a sequence at most, queries of a span at most.
        spans: (B, 8) fields of `Span`.
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
    """Blocks that one threadgroup takes at most: so that there are 8 threadgroups a core.

    Where sequences and heads are many each sequence is one item, and nothing is reduced; where
    they are few, or one is much longer than the rest, it is split. Short contexts are split finer,
    into 2 threadgroups a core, except where nothing would have to be reduced.
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
