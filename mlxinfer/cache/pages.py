"""Which page ids are free. Pure Python; knows no arrays, no tokens.

A page is `page_size` consecutive token positions of one sequence in every layer of a group. The
allocator hands out consecutive ids while it can: a run of pages is a view of the pool that needs no
gather.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from .page_table import PageTable


class OutOfPages(Exception):
    """The pool has too few free pages; the scheduler waits or preempts."""


class PageAllocator:
    """Free pages as runs, merged when they meet.

    Hundreds of sequences take their next page in turn, which must not touch much memory: a run is
    known by the page where it ends, so that nothing is moved when it begins a page later.

    `headroom` pages are left after the last owner where a new run is placed, so that both can grow
    without breaking their runs; they stay free, and are used when nothing else is left.

    Attributes:
        num_present: pages that the arrays have: a new run is placed among them, without headroom
            if need be, before one is begun further on.
    """

    def __init__(self, num_pages: int, *, headroom: int = 8) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_present = num_pages
        self.extent = 0  # one more than the highest page id ever handed out
        self._headroom = headroom
        # Of a free run: its length at its first page, and that page at the one past its last.
        self._length_from = array("i", [0]) * (num_pages + 1)
        self._start_before = array("i", [-1]) * (num_pages + 1)
        # Where the runs longer than the headroom end, in order; and heaps of where the others ended
        # when they were noted, by length; stale entries are dropped when they come up.
        self._long = array("i")
        self._short: list[list[int]] = [[] for _ in range(headroom + 1)]
        self._put(0, num_pages)

    @property
    def num_held(self) -> int:
        """Pages that are not free."""
        return self.num_pages - self.num_free

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Take `count` pages, continuing the run that ends in page `after` while that is free.

        Raises:
            OutOfPages: fewer than `count` pages are free; then nothing is taken.
        """
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        self.num_free -= count
        start = -1 if after is None else after + 1
        taken = self._take(start, count) if start >= 0 and self._length_from[start] else []
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._take(self._place(missing), missing)
        return taken

    def extend(self, tables: Sequence[PageTable], num_tokens: Sequence[int]) -> bool:
        """A page more for each table that has no slot for the last of so many tokens.

        What one `allocate` after the other gives, in few calls: in each step of a large batch many
        sequences come to the end of a page.

        Args:
            tables: each lacks one page at most.
            num_tokens: of each.

        Returns:
            False: there are not enough free pages for all; then nothing is taken.
        """
        full = [t for t, n in zip(tables, num_tokens, strict=True) if t.end < n]
        if len(full) > self.num_free:
            return False
        for table in full:
            last = table.last
            if last is not None and self._length_from[last + 1]:
                self._shorten(last + 1)
                self.num_free -= 1
                table.append([last + 1])
            else:
                table.append(self.allocate(1))
        return True

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back."""
        for page in pages:
            self._free(page)
            self.num_free += 1

    def _place(self, count: int) -> int:
        """First page for a new run: the lowest place with headroom that is near.

        Where there is none: the longest free run that is near, if that is long enough; the lowest
        place with headroom anywhere; the longest free run.
        """
        roomy = self._with_headroom(count)
        if roomy is not None and sum(roomy) + count <= self.num_present:
            return self._split(*roomy)
        longest, length = self._longest(self.num_present)
        if length >= count:
            return longest
        return self._longest(self.num_pages)[0] if roomy is None else self._split(*roomy)

    def _with_headroom(self, count: int) -> tuple[int, int] | None:
        """The first free run with place for `count` pages, and how many to leave free before."""
        if self._length_from[0] >= count:
            return 0, 0
        for end in self._long:
            start = self._start_before[end]
            if start and end - start >= self._headroom + count:
                return start, self._headroom
        return None

    def _longest(self, stop: int) -> tuple[int, int]:
        """The longest of the free runs below page `stop`, as far as they are below it; its length.

        Costs the number of runs longer than the headroom: of the others the first of a length is
        the one, but for one run that may go on beyond `stop`.
        """
        best, most = -1, 0
        for end in self._long:
            start = self._start_before[end]
            length = min(end, stop) - start
            if length > most:
                best, most = start, length
        for whole in range(self._headroom, 0, -1):
            if whole < most:
                break
            start = self._first_short(whole)
            length = min(whole, stop - start) if start >= 0 else 0
            if length > most or (length == most and 0 <= start < best):
                best, most = start, length
        return best, most

    def _first_short(self, length: int) -> int:
        """First page of the first run of this length, at most the headroom; -1: there is none."""
        ends = self._short[length]
        while ends and self._start_before[ends[0]] != ends[0] - length:
            heappop(ends)
        return ends[0] - length if ends else -1

    def _split(self, start: int, offset: int) -> int:
        """Cut a free run in two, `offset` pages in; the second part's first page."""
        if offset:
            length = self._pop(start)
            self._put(start, offset)
            self._put(start + offset, length - offset)
        return start + offset

    def _take(self, start: int, count: int) -> list[int]:
        """Up to `count` pages from the front of the free run at `start`."""
        count = min(count, self._length_from[start])
        self._shorten(start, count)
        return [*range(start, start + count)]

    def _free(self, page: int) -> None:
        assert 0 <= page < self.num_pages
        start, end = page, page + 1
        if self._start_before[page] >= 0:  # a free run ends right before this page
            start = self._start_before[page]
            self._pop(start)
        if self._length_from[end]:  # and one starts right after it
            end += self._pop(end)
        self._put(start, end - start)

    def _put(self, start: int, length: int) -> None:
        """Note a free run."""
        self._length_from[start] = length
        self._start_before[start + length] = start
        if length > self._headroom:
            insort(self._long, start + length)
        else:
            self._note_short(start + length, length)

    def _pop(self, start: int) -> int:
        """Forget the free run that starts here; its length."""
        length = self._length_from[start]
        if length > self._headroom:
            self._long.pop(bisect_left(self._long, start + length))
        self._length_from[start] = 0
        self._start_before[start + length] = -1
        return length

    def _shorten(self, start: int, count: int = 1) -> None:
        """Take the first pages of a free run."""
        length = self._length_from[start]
        stop, left = start + count, length - count
        assert 0 < count <= length, "no such run"
        if stop > self.extent:
            self.extent = stop
        if left > self._headroom:  # it ends where it ended
            self._length_from[start] = 0
            self._length_from[stop] = left
            self._start_before[stop + left] = stop
            return
        self._pop(start)
        if left:
            self._put(stop, left)

    def _note_short(self, end: int, length: int) -> None:
        """Note where a run of this length ends; stale notes never outnumber pages."""
        ends = self._short[length]
        heappush(ends, end)
        if len(ends) > self.num_pages:
            ends[:] = sorted({e for e in ends if self._start_before[e] == e - length})
