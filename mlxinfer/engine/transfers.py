"""Pages on their way between the prefix tree and the disk. No mlx.

They belong to the tree: what is under way is carried out before the next step, whatever becomes of
the request that caused it.
"""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from ..cache.groups import PageGroup
from ..cache.inputs import Load, Spill
from ..cache.pages import PageTable
from ..cache.prefix import PrefixTree, RestorePoint, StoredPage
from .pagestore import Found, PageStore, Stored


class Prompt(NamedTuple):
    """Tokens, and what must agree besides for their pages to be shared."""

    namespace: Hashable
    token_ids: list[int]


class Transfers:
    """What is to be read out of pages that were evicted, and what is to be written to others.

    Args:
        store: where pages go and come from.
        groups: what layers keep in pages.
    """

    def __init__(self, store: PageStore, groups: Seq[PageGroup]) -> None:
        self._store = store
        self._groups = groups
        self._allocators = [group.allocator for group in groups]
        self._spills: list[Spill] = []
        self._loads: dict[tuple[int, int], Load] = {}  # (group, page id) -> what is to go there

    def take(self) -> tuple[list[Spill], list[Load]]:
        """Pages to be read out before the next step, and then those to be filled."""
        spills = self._store.affordable(self._spills)
        loads = list(self._loads.values())
        self.forget()
        return spills, loads

    def forget(self) -> None:
        """Drop all transfers."""
        self._spills, self._loads = [], {}

    # -- to the disk ----------------------------------------------------------------------------

    def note_evicted(self, pages: Seq[StoredPage]) -> None:
        """Note evicted pages, to be stored; those that wait for content from the disk are not."""
        for page in pages:
            places = [(g, i) for g, i in enumerate(page.pages) if i is not None]
            places += [(self._store.state_group, s.number) for s in page.snapshots]
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

    def fetch(
        self,
        tree: PrefixTree,
        namespace: Hashable,
        ids: list[int],
        has_room: Callable[[RestorePoint], bool],
    ) -> None:
        """Put what only the disk has of a prompt into the tree, where there is room."""
        point = tree.probe(namespace, ids)
        lease = tree.hold_path(point)
        if has_room(point):
            found = self._store.find(ids, point)
            counts = [len(p) for p in found.pages[: len(self._groups)]] if found else []
            pages = self._allocate(tree, counts) if found else None
            if found and pages:
                self._insert(tree, Prompt(namespace, ids), found, pages)
        tree.unlock(lease)

    def _allocate(self, tree: PrefixTree, counts: Seq[int]) -> list[list[int]] | None:
        """Allocate so many pages of each group; None: there is no room."""
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
        self, tree: PrefixTree, prompt: Prompt, found: Found, pages: list[list[int]]
    ) -> None:
        """Give pages to the tree, and note what is to go there."""
        runs: list[tuple[int, int, list[int]]] = []  # group, number of the first, page ids
        for group, numbers in enumerate(pages):
            read = found.pages[group]
            for number, page in zip(read, numbers, strict=True):
                key, payload = read[number]
                self._loads[group, page] = Load(group, page, payload, key)
                last = runs[-1] if runs else None
                if last and last[0] == group and last[1] + len(last[2]) == number:
                    last[2].append(page)
                else:
                    runs.append((group, number, [page]))
        whole = [run for run in runs if not self._groups[run[0]].recycles]
        for some in [whole, *[[run] for run in runs if run not in whole]]:
            if some:
                self._insert_runs(tree, prompt, some)
        for states in found.pages[len(pages) :]:
            for number, stored in states.items():
                self._insert_snapshot(tree, prompt, number, stored)

    def _insert_runs(
        self, tree: PrefixTree, prompt: Prompt, runs: list[tuple[int, int, list[int]]]
    ) -> None:
        """Runs of several groups that end at the same page."""
        _, first, last_run = runs[0]
        stop, size = first + len(last_run), self._store.page_size
        tables = [PageTable(size, first=stop) for _ in self._allocators]
        for group, first, pages in runs:
            tables[group] = PageTable(size, first=first, pages=pages)
        for duplicate in tree.insert(prompt.namespace, prompt.token_ids[: stop * size], tables):
            self._loads.pop((duplicate.group, duplicate.own))
            self._allocators[duplicate.group].release([duplicate.own])

    def _insert_snapshot(self, tree: PrefixTree, prompt: Prompt, number: int, read: Stored) -> None:
        """The state after page `number`, where there is room for it."""
        snapshot = tree.add_snapshot(*prompt, (number + 1) * self._store.page_size)
        if snapshot is not None:
            place = self._store.state_group, snapshot.number
            self._loads[place] = Load(*place, read.payload, read.key)
