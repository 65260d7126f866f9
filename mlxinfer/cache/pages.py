"""Pages: which of them a sequence holds, by position, and which are free. No arrays of MLX.

A page is `page_size` consecutive token positions of one sequence in every layer of a group. The
allocator hands out consecutive ids while it can: a run of pages is a view of the pool that needs no
gather.

A page group keeps a vector or more for each token, in pages: attention or latent attention, over
all positions or a window with sinks. A state group keeps one state for a whole sequence: recurrent
layers.

`longest_prefix` is the one rule of reuse: after how many tokens of a prompt every group can go on.
Whoever asks says what it has: memory alone, or memory with a disk and peers.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray


class PageTable:
    """The pages of one sequence in one group, in order of position.

    A window recycles pages at the front, all but the first `num_kept`, which hold the sinks.
    After them follows page number (position // page_size) `first`.

    Args:
        num_kept: pages at the front that stay.
        first: see above; num_kept at least.
        kept: pages of the first page numbers, up to `num_kept` of them.
        pages: those from page number `first` on.

    Attributes:
        num_changes: how often the table was changed.
        rewritten: the number of the last change that replaced a page; 0: none did. Others add
            pages behind the last one, or recycle the first ones.
    """

    __slots__ = (
        "__weakref__",
        "_numbers",
        "first",
        "num_changes",
        "num_kept",
        "page_size",
        "rewritten",
    )

    def __init__(
        self,
        page_size: int,
        num_kept: int = 0,
        first: int = 0,
        kept: Iterable[int] = (),
        pages: Iterable[int] = (),
    ) -> None:
        self.page_size = page_size
        self.num_kept = num_kept
        self.first = max(first, num_kept)
        gone = [-1] * (self.first - num_kept)
        self._numbers = array("i", [*kept, *gone, *pages])  # page of each page number, -1: gone
        self.num_changes = self.rewritten = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageTable) and self._says() == other._says()

    def __repr__(self) -> str:
        return "PageTable(page_size={}, num_kept={}, first={}, {})".format(*self._says())

    def _says(self) -> tuple[int, int, int, "array[int]"]:
        return self.page_size, self.num_kept, self.first, self._numbers

    @property
    def end(self) -> int:
        return len(self._numbers) * self.page_size

    @property
    def kept(self) -> list[int]:
        return self._numbers[: self.num_kept].tolist()

    @property
    def pages(self) -> list[int]:
        return self._numbers[self.first :].tolist()

    @property
    def all_pages(self) -> list[int]:
        return (self._numbers[: self.num_kept] + self._numbers[self.first :]).tolist()

    @property
    def last(self) -> int | None:
        """The page of the last page number; None: it holds none."""
        page = self._numbers[-1] if self._numbers else -1
        return page if page >= 0 else None

    def page_at(self, page_number: int) -> int | None:
        """The page of a page number; None: it was recycled."""
        page = self._numbers[page_number]
        return page if page >= 0 else None

    def copy(self) -> "PageTable":
        """A table of the same pages, which no change of this one reaches."""
        kept, rest = self._numbers[: self.num_kept], self._numbers[self.first :]
        return PageTable(self.page_size, self.num_kept, self.first, kept, rest)

    def replace(self, page_number: int, page: int) -> None:
        """Use `page` for the positions of `page_number`, which is held, from now on."""
        self._numbers[page_number] = page
        self.num_changes += 1
        self.rewritten = self.num_changes

    def append(self, pages: list[int]) -> None:
        self._numbers.extend(pages)
        self.num_changes += 1

    def drop_before(self, page_number: int) -> list[int]:
        """Recycle the pages before `page_number` that are not kept; returns them."""
        stop = min(page_number, len(self._numbers))
        dropped = self._numbers[self.first : stop]
        if dropped:
            self._numbers[self.first : stop] = array("i", [-1]) * len(dropped)
            self.first = stop
            self.num_changes += 1
        return dropped.tolist()

    def numbers_before(self, stop: int) -> "array[int]":
        """The page of every page number of positions [0, stop), int32; -1: recycled."""
        return self._numbers[: stop // self.page_size]

    def numbers_from(self, page_number: int) -> "array[int]":
        """The page of every page number from this one on, int32; -1: recycled."""
        return self._numbers[page_number:]

    def become(self, first: int, start: int, pages: bytes) -> None:
        """Take another table's pages: recycled up to `first`, from page number `start` on these.

        Args:
            start: a page number, at most the number of pages.
            pages: what `numbers_from` gave, as bytes.
        """
        del self._numbers[start:]
        self._numbers.frombytes(pages)
        for number in range(self.first, min(first, len(self._numbers))):
            self._numbers[number] = -1
        self.first = first
        self.num_changes += 1

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The pool slots of positions [start, stop) as few [from, to) ranges, in order."""
        assert 0 <= start <= stop <= self.end, (self, start, stop)
        size = self.page_size
        ranges: list[tuple[int, int]] = []
        for number in range(start // size, -(-stop // size)):
            page = self._numbers[number]
            assert page >= 0, (self, start, stop)
            shift = (page - number) * size
            begin, end = shift + max(start, number * size), shift + min(stop, (number + 1) * size)
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((begin, end))
        return ranges


class PageAllocator:
    """Free pages, handed out in runs of consecutive ids while there are any.

    Attributes:
        headroom: pages that are left free after the last owner where a new run is placed, so that
            both can grow without breaking their runs. They are used when nothing else is left.
        num_present: pages that the arrays have: a new run is placed among them, without headroom
            if need be, before one is begun further on.
        extent: one more than the highest page id ever handed out.
    """

    def __init__(self, num_pages: int, *, headroom: int = 8) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_present = num_pages
        self.extent = 0
        self.headroom = headroom
        self._free = bytearray()  # by page id: 1 or 0; pages beyond are free

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free

    def resize(self, num_pages: int) -> None:
        """Set the number of pages; pages that go must be free."""
        assert 0 not in self._free[num_pages:], "pages that are to go are held"
        del self._free[num_pages:]
        self.num_free += num_pages - self.num_pages
        self.num_pages = num_pages

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Take `count` pages, continuing the run that ends in page `after` while that is free.

        So many must be free: see `num_free`.
        """
        assert count <= self.num_free, (count, self.num_free, self.num_pages)
        taken = [] if after is None else self._take(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._take(self._place(missing), missing)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not self._free[page], "released twice"
            self._free[page] = 1
            self.num_free += 1

    def _take(self, start: int, count: int) -> list[int]:
        """Up to `count` free pages, one after another, from page `start` on."""
        held = self._free.find(0, start, start + count)
        stop = min(start + count, self.num_pages) if held < 0 else held
        self._free += b"\1" * (stop - len(self._free))  # none where all are known
        self._free[start:stop] = bytes(stop - start)
        self.num_free -= stop - start
        if stop > start:
            self.extent = max(self.extent, stop)
        return [*range(start, stop)]

    def _place(self, count: int) -> int:
        """First page for a new run: the lowest place with headroom that is near.

        Where there is none: the longest near run, if that is long enough; the lowest place with
        headroom anywhere; the longest run.
        """
        known, page_behind = len(self._free), np.int8(len(self._free) < self.num_pages)
        free = np.append(np.frombuffer(self._free, np.int8), page_behind)
        edges = np.flatnonzero(np.diff(free, prepend=np.int8(0), append=np.int8(0)))
        starts, stops = edges[::2], edges[1::2]  # of free runs
        stops[stops > known] = self.num_pages  # the last one goes on
        places = starts + np.where(starts > 0, self.headroom, 0)
        roomy = places[places + count <= stops]
        if len(roomy) and roomy[0] + count <= self.num_present:
            return int(roomy[0])
        lengths = np.minimum(stops, self.num_present) - starts
        longest = int(lengths.argmax())
        if lengths[longest] >= count:
            return int(starts[longest])
        return int(roomy[0] if len(roomy) else starts[(stops - starts).argmax()])


HeldUntil = Callable[[int, int], int]
"""(start, stop): positions, the first of a page and a later one -> up to where a group has the
pages between them without a gap; of states, the last of these positions that has one; else start.

Whoever has pages says so: memory, a disk, a peer.
"""
Positions = NDArray[np.int32] | np.int64
ENDLESS = 2**31  # more tokens than any sequence has


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The token at position q sees k <= q where k < sinks or k > q - size; `size` None: all.

    `chunked`: it sees k <= q of the same chunk, which are `size` positions from a multiple of it.
    `sees_spans`: a token of a span sees the later ones of the span, too.
    """

    size: int | None = None
    sinks: int = 0
    chunked: bool = False
    sees_spans: bool = False

    def lowest(self, position: int) -> int:
        return 0 if self.size is None else int(self.lowest_of(np.int64(position)))

    def lowest_of(self, positions: Positions) -> Positions:
        if self.size is None:
            return positions * 0
        if self.chunked:
            return positions - positions % self.size
        return np.maximum(positions - self.size + 1, 0)

    def ranges(self, position: int, stop: int) -> list[tuple[int, int]]:
        """Positions before `stop` that tokens from `position` on may see, as few ranges."""
        lowest = self.lowest(position)
        if lowest <= self.sinks:
            return [(0, stop)] if stop else []
        parts = [(0, min(self.sinks, stop)), (lowest, stop)]
        return [(start, end) for start, end in parts if start < end]

    def sees(
        self,
        queries: NDArray[np.int32],
        keys: NDArray[np.int32],
        spans: NDArray[np.int32] | None = None,
    ) -> NDArray[np.bool_]:
        """Whether each query position sees each key position; arrays that broadcast.

        Args:
            spans: (2, ...) positions from, and up to, of the span of each query, with the axes of
                `queries`: inside its span a query sees later ones, too; None: there are no spans.
        """
        last = queries if spans is None else np.maximum(queries, spans[1] - 1)
        visible = keys <= last
        if self.size is not None:
            visible &= (keys >= self.lowest_of(queries)) | (keys < self.sinks)
        return visible

    def kept_pages(self, page_size: int) -> int:
        return 0 if self.size is None else -(-self.sinks // page_size)

    def first_page(self, position: int, page_size: int) -> int:
        return self.lowest(position) // page_size


@dataclass(slots=True)
class PageGroup:
    """Layers that keep the same positions of every sequence, and so share page tables."""

    window: AttentionWindow  # which positions a token sees
    allocator: PageAllocator  # of the group's pages
    page_size: int  # tokens a page
    prefill_chunk: int  # tokens of a step's prefill; windows hold that much more for a moment
    page_bytes: int  # of a page, all layers together
    number: int = 0  # of the group among the page tables of a sequence
    whole_pages: bool = False  # a sequence can go on only where a page ends
    num_kept: int = field(init=False)  # pages at the front that are never recycled: they hold sinks
    recycles: bool = field(init=False)  # whether pages of a running sequence ever become free

    def __post_init__(self) -> None:
        self.num_kept = self.window.kept_pages(self.page_size)
        self.recycles = self.window.lowest(ENDLESS) > 0

    def first_page(self, num_tokens: int) -> int:
        return self.window.lowest(num_tokens) // self.page_size

    def needed_pages(self, num_tokens: int) -> list[int]:
        """Numbers of the whole pages that are needed to go on after `num_tokens` positions."""
        first = self.first_page(num_tokens)
        return [*range(min(self.num_kept, first)), *range(first, num_tokens // self.page_size)]

    def new_pages(self, number: int) -> list[int]:
        """Of the pages needed to go on after page `number`, those that a resumed sequence may lack.

        Where none is recycled, it has all but the last.
        """
        return self.needed_pages((number + 1) * self.page_size) if self.recycles else [number]

    def last_resumable(self, num_tokens: int, held_until: HeldUntil) -> int:
        """The last position up to `num_tokens` that a sequence can go on from.

        At position p it needs the pages of the sinks and those of p - W + 1 to p - 1. Inside of a
        page it needs that page too, so that no page has gaps. Each page is looked for once: those
        that all later tokens need in order, up to the first that is missing; others from the end.
        """
        size = self.page_size
        if not self.recycles:
            return held_until(0, num_tokens)
        of_sinks = min(self.num_kept * size, num_tokens)
        reached = held_until(0, of_sinks)
        position = num_tokens if reached == of_sinks else reached
        first, number = self.first_page(position), -(-position // size) - 1
        while number >= first:
            start, stop = number * size, min((number + 1) * size, position)
            if held_until(start, stop) < stop:
                position = start  # further on in this page would need it, too
                first = self.first_page(position)
            number -= 1
        return position

    def max_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` holds at once, at most."""
        pages = -(-num_tokens // self.page_size)
        if self.window.size is None:
            return pages
        held = -(-(self.window.size - 1) // self.page_size) + 1 + self.num_kept
        return min(pages, held + self.prefill_chunk // self.page_size)

    def recycle(self, table: PageTable, num_tokens: int) -> list[int]:
        """Pages of the table that no later token sees, which it gives up."""
        return table.drop_before(self.first_page(num_tokens))


class StateGroup:
    """Layers that keep a state of fixed size of each sequence, and snapshots of such states.

    A state cannot go back: a sequence resumes only where a snapshot was taken. Snapshots are known
    by numbers that are never used twice, so that one may be dropped and another be taken before
    either is done to the arrays.
    """

    def __init__(self, num_bytes: int, max_snapshots: int) -> None:
        self.num_bytes = num_bytes
        self.max_snapshots = max_snapshots
        self.num_held = 0
        self._num_taken = 0
        self._dropped: list[int] = []

    @property
    def has_room(self) -> bool:
        return self.num_held < self.max_snapshots

    def last_resumable(self, num_tokens: int, held_until: HeldUntil, page_size: int) -> int:
        """The last position up to `num_tokens` that has a snapshot; 0: none has."""
        for start in range((num_tokens - 1) // page_size * page_size, -1, -page_size):
            if (reached := held_until(start, min(start + page_size, num_tokens))) > start:
                return reached
        return 0

    def allocate(self) -> int:
        assert self.has_room
        self.num_held += 1
        self._num_taken += 1
        return self._num_taken

    def release(self, snapshot: int) -> None:
        """Give a snapshot up; its arrays go with the next step."""
        self.num_held -= 1
        self._dropped.append(snapshot)

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped


Rule = Callable[[int], int]  # position -> the last one up to it where a group can resume
Spans = Sequence[tuple[int, int]]  # [from, to) positions that are reused as a whole or not at all
HeldBy = Callable[[int, int, int], int]
"""(group, start, stop): `HeldUntil` of each group, the states last."""


def resume_point(longest: int, rules: Sequence[Rule], alignment: int = 1) -> int:
    """The last position up to `longest` that all groups accept, a multiple of `alignment`."""
    point, checked = longest - longest % alignment, -1
    while point != checked:
        checked = point
        for lower in rules:
            point = lower(point)
            point -= point % alignment
    return point


def span_rule(start: int, stop: int) -> Rule:
    """All positions except those inside of a span: its tokens are reused together or not at all."""
    return lambda point: start if start < point < stop else point


def longest_prefix(
    longest: int,
    groups: Sequence[PageGroup],
    states: StateGroup | None,
    held: HeldBy,
    *,
    spans: Spans = (),
    alignment: int = 1,
) -> int:
    """The last position up to `longest` from which a prompt can go on.

    Groups in which all later tokens see every page are asked first and once: they look for each
    page in order, up to the first that is missing.
    """
    rules: list[Rule] = []
    for number, group in enumerate(groups):
        rule = partial(group.last_resumable, held_until=partial(held, number))
        if group.recycles:
            rules.append(rule)
        else:
            longest = rule(longest)
    if states is not None:
        of_states, size = partial(held, len(groups)), groups[0].page_size
        rules.append(partial(states.last_resumable, held_until=of_states, page_size=size))
    return resume_point(longest, [*rules, *[span_rule(*span) for span in spans]], alignment)
