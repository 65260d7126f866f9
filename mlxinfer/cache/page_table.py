"""Which pages a sequence holds, by position. Pure Python; knows no pool and no tokens."""

from array import array
from collections.abc import Iterable


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
    """

    __slots__ = ("_before", "_numbers", "_runs", "first", "num_kept", "page_size")

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
        self._runs: list[tuple[int, int]] | None = None
        self._before: tuple[int, list[tuple[int, int]]] | None = None

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
        self._forget()

    def pages_from(self, page_number: int) -> list[int]:
        """Pages held whose number is at least `page_number`."""
        return [page for page in self._numbers[page_number:] if page >= 0]

    def append(self, pages: list[int]) -> None:
        """Take pages for the positions that follow."""
        self._numbers.extend(pages)
        self._forget()

    def drop_before(self, page_number: int) -> list[int]:
        """Recycle the pages before `page_number` that are not kept; returns them."""
        stop = min(page_number, len(self._numbers))
        dropped = self._numbers[self.first : stop]
        if dropped:
            self._numbers[self.first : stop] = array("i", [-1]) * len(dropped)
            self.first = stop
            self._forget()
        return dropped.tolist()

    def numbers_before(self, stop: int) -> "array[int]":
        """The page of every page number of positions [0, stop), int32; -1: recycled."""
        return self._numbers[: stop // self.page_size]

    def runs_before(self, stop: int) -> list[tuple[int, int]]:
        """The pool slots of positions [0, stop) of a table that keeps everything; remembered."""
        if self._before is None or self._before[0] != stop:
            self._before = stop, self.runs(0, stop) if stop else []
        return self._before[1]

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The pool slots of positions [start, stop) as few [from, to) ranges, in order."""
        assert 0 <= start < stop <= self.end, (self, start, stop)
        gap = (self.first - self.num_kept) * self.page_size  # positions whose pages were recycled
        edge = self.num_kept * self.page_size
        assert not gap or stop <= edge or start >= edge + gap, (self, start, stop)
        ranges: list[tuple[int, int]] = []
        skipped = start if start < edge else start - gap
        wanted = stop - start
        for page, length in self._page_runs():
            if skipped >= length:
                skipped -= length
                continue
            slot = page + skipped
            count = min(length - skipped, wanted)
            ranges.append((slot, slot + count))
            skipped, wanted = 0, wanted - count
            if not wanted:
                break
        return ranges

    def _forget(self) -> None:
        """The table changed."""
        self._runs = self._before = None

    def _page_runs(self) -> list[tuple[int, int]]:
        """Runs of consecutive pages as (first slot, slots); found once per change of the table."""
        if self._runs is None:
            runs: list[list[int]] = []
            for page in self.all_pages:
                slot = page * self.page_size
                if runs and runs[-1][0] + runs[-1][1] == slot:
                    runs[-1][1] += self.page_size
                else:
                    runs.append([slot, self.page_size])
            self._runs = [(slot, length) for slot, length in runs]
        return self._runs
