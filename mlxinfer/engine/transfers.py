"""Pages of the prefix tree on their way to the disk and back. Pure Python; knows no sequences.

They belong to the tree: whatever becomes of a request, they are carried out before the next step.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ..cache.page_table import PageTable
from ..cache.pages import PageAllocator
from ..cache.prefix import PrefixTree, StoredPage
from ..cache.prefix.match import Match
from .batch import Load, Spill
from .pagestore import Found, PageStore


class Transfers:
    """What is to be read out of pages that were evicted, and what is to be written to others.

    Args:
        store: where pages go and come from.
        allocators: the pages of each layer group.
    """

    def __init__(self, store: PageStore, allocators: Seq[PageAllocator]) -> None:
        self._store = store
        self._allocators = allocators
        self._spills: list[Spill] = []
        self._loads: dict[tuple[int, int], Load] = {}  # (group, page id) -> what is to go there

    def take(self) -> tuple[list[Spill], list[Load]]:
        """Pages to be read out before the next step, and then those to be filled."""
        spills = self._store.affordable(self._spills)
        loads = list(self._loads.values())
        self.forget()
        return spills, loads

    def forget(self) -> None:
        """Nothing is on its way any more."""
        self._spills, self._loads = [], {}

    # -- to the disk ----------------------------------------------------------------------------

    def note_evicted(self, pages: Seq[StoredPage]) -> None:
        """Pages go; what is yet to be filled from the disk need not go there, nor be filled."""
        for page in pages:
            places = [(g, i) for g, i in enumerate(page.pages) if i is not None]
            unfilled = {place for place in places if self._loads.pop(place, None)}
            self._spills += [
                spill
                for spill in self._store.spills(page)
                if (spill.group, spill.page) not in unfilled
            ]

    def all_of(self, tree: PrefixTree) -> list[Spill]:
        """All that the tree has and the disk lacks, what was used last and parents first."""
        pages = sorted(tree.stored(), key=lambda p: (-p.node.tick, p.page_number))
        self.note_evicted(pages)
        spills, self._spills = self._spills, []
        return spills

    # -- from the disk --------------------------------------------------------------------------

    def fetch(self, tree: PrefixTree, ids: list[int], has_room: Callable[[Match], bool]) -> None:
        """Put into the tree what the disk has of a prompt beyond that, where there is room."""
        match = tree.match(None, ids)
        lease = tree.pin(None, ids[: match.num_tokens])
        if has_room(match):
            found = self._store.find(ids, match)
            pages = self._allocate(tree, [len(p) for p in found.payloads]) if found else None
            if found and pages:
                self._insert(tree, ids, found, pages)
        tree.unlock(lease)

    def _allocate(self, tree: PrefixTree, counts: Seq[int]) -> list[list[int]] | None:
        """So many pages of each group; None: there is no room."""
        taken: list[list[int]] = []
        for group, count in enumerate(counts):
            allocator = self._allocators[group]
            if count > allocator.num_free:
                tree.evict(group, count - allocator.num_free)
            if count > allocator.num_free:
                for allocated, pages in zip(self._allocators, taken, strict=False):
                    allocated.release(pages)
                return None
            taken.append(allocator.allocate(count))
        return taken

    def _insert(
        self, tree: PrefixTree, ids: list[int], found: Found, pages: list[list[int]]
    ) -> None:
        """Give pages to the tree, and note what is to go there."""
        runs: list[tuple[int, int, list[int]]] = []  # group, number of the first, page ids
        for group, payloads in enumerate(found.payloads):
            for number, page in zip(payloads, pages[group], strict=True):
                self._loads[group, page] = Load(group, page, payloads[number])
                last = runs[-1] if runs else None
                if last and last[0] == group and last[1] + len(last[2]) == number:
                    last[2].append(page)
                else:
                    runs.append((group, number, [page]))
        windows = self._store.windows
        whole = [run for run in runs if windows[run[0]].size is None]
        for some in [whole, *[[run] for run in runs if run not in whole]]:
            if some:
                self._insert_runs(tree, ids, some)

    def _insert_runs(
        self, tree: PrefixTree, ids: list[int], runs: list[tuple[int, int, list[int]]]
    ) -> None:
        """Runs of several groups that end at the same page."""
        _, first, last_run = runs[0]
        stop, size = first + len(last_run), self._store.page_size
        tables = [PageTable(size, first=stop) for _ in self._allocators]
        for group, first, pages in runs:
            tables[group] = PageTable(size, first=first, pages=pages)
        for duplicate in tree.insert(None, ids[: stop * size], tables):
            self._loads.pop((duplicate.group, duplicate.own))
            self._allocators[duplicate.group].release([duplicate.own])
