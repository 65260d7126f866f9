"""Pages: which of them a sequence holds, by position, and which are free. Pure Python; no arrays.

A page is `page_size` consecutive token positions of one sequence in every layer of a group. The
allocator hands out consecutive ids while it can: a run of pages is a view of the pool that needs no
gather.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush


class PageTable:
    """The pages of one sequence in one group, in order of position.

    A window recycles pages at the front, all but the first `num_kept`, which hold the sinks.
    After them follows page number (position // page_size) `first`.

    Args:
        page_size: tokens a page.
        num_kept: pages at the front that stay.
        first: see above; num_kept at least.
        kept: pages of the first page numbers, up to `num_kept` of them.
        pages: those from page number `first` on.

    Attributes:
        num_changes: so far.
        rewritten: the last of them that changed a page that was there; 0: none did. Others add
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
        """One past the last position that has a slot."""
        return len(self._numbers) * self.page_size

    @property
    def kept(self) -> list[int]:
        """Pages of the first page numbers, which stay."""
        return self._numbers[: self.num_kept].tolist()

    @property
    def pages(self) -> list[int]:
        """Pages from page number `first` on."""
        return self._numbers[self.first :].tolist()

    @property
    def all_pages(self) -> list[int]:
        """Every page held, in order."""
        return self.kept + self.pages

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
        return PageTable(self.page_size, self.num_kept, self.first, self.kept, self.pages)

    def replace(self, page_number: int, page: int) -> None:
        """Use `page` for the positions of `page_number`, which is held, from now on."""
        self._numbers[page_number] = page
        self.num_changes += 1
        self.rewritten = self.num_changes

    def pages_from(self, page_number: int) -> list[int]:
        """Pages held from number `page_number` on."""
        return [page for page in self._numbers[page_number:] if page >= 0]

    def append(self, pages: list[int]) -> None:
        """Take pages for the positions that follow."""
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
            first: as of the constructor.
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

    def resize(self, num_pages: int) -> None:
        """Set the number of pages, at most what it was at first; pages that go must be free."""
        more = num_pages - self.num_pages
        if more < 0:
            start = self._start_before[self.num_pages]
            assert 0 <= start <= num_pages, "pages that are to go are held"
            length = self._pop(start)
            if length + more:
                self._put(start, length + more)
            self.num_free += more
        self.num_pages = num_pages
        self.release(range(num_pages - more, num_pages) if more > 0 else ())

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
