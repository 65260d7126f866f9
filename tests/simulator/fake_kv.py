"""The contents of a KV cache with integers for tensors, moved as the real one moves them.

Pools and tails hold a hash for every slot. What no step may read any more is poisoned as soon as
pages may be written, and reading poison fails. Knows no queues and no hashes' meaning.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from simulator.fake_states import FakeStates
from simulator.oracle import layer_groups

from mlxinfer.cache.disk import Entry
from mlxinfer.cache.inputs import CacheWork, Move, PageTransfer
from mlxinfer.cache.pages import AttentionWindow, PageAllocator, PageTable
from mlxinfer.engine.batch import Segment

POISON = 1 << 80  # no hash is as large

Places = tuple[list[tuple[int, int]], list[int]]  # ranges of pool slots, offsets in the tail


class WatchedAllocator(PageAllocator):
    """Remembers what was given back."""

    def __init__(self, num_pages: int, *, headroom: int) -> None:
        super().__init__(num_pages, headroom=headroom)
        self.given_back: set[int] = set()

    def release(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().release(pages)
        self.given_back.update(pages)

    def is_free(self, page: int) -> bool:
        """Whether a page that was given back has no new owner."""
        return bool(self._free[page])


class FakeKV:
    """The contents of pages and tails, by layer."""

    def __init__(
        self,
        windows: Sequence[AttentionWindow],
        allocators: Sequence[WatchedAllocator],
        *,
        page_size: int,
        max_batch: int,
        states: FakeStates | None = None,
    ) -> None:
        self.states = states
        self.windows, self.allocators = windows, allocators
        self.page_size, self.max_batch = page_size, max_batch
        self.groups = layer_groups(len(windows))
        self.may_write_pages = False
        self.reset()

    def reset(self) -> None:
        """After a fault nothing that was there is there."""
        size = self.page_size
        self.pools = [[POISON] * (self.allocators[g].num_pages * size) for g in self.groups]
        self.tails: list[list[list[int]]] = [[] for _ in self.groups]
        self.make_room(1)
        if self.states is not None:
            self.states.reset()

    @property
    def num_slots(self) -> int:
        """Tails that there are."""
        return len(self.tails[0])

    def make_room(self, num_slots: int, *, shrink: bool = False) -> None:
        """Grow until there are tails enough, no further: what is asked for must do."""
        assert num_slots <= self.max_batch
        for tails in self.tails:
            if shrink:
                del tails[num_slots:]
            while len(tails) < num_slots:
                tails.append([POISON] * (2 * self.page_size))

    def poison_given_back(self, work: CacheWork) -> None:
        """Behind a barrier only `work` reads what was given back since the last one.

        The page that a copy reads may be free by then: it is poisoned behind the next barrier.
        """
        for group, allocator in enumerate(self.allocators):
            spilled = {spill.page for spill in work.spill if spill.group == group}
            copied = {page for copy in work.copies if (page := copy.pages[group]) is not None}
            read = {page for page in allocator.given_back & copied if allocator.is_free(page)}
            for page in allocator.given_back - spilled - read:
                self._poison(group, page)
            allocator.given_back = read

    def poison_pages(self, spills: Sequence[PageTransfer]) -> None:
        """They were read out, and that was the last of them."""
        for spill in spills:
            self._poison(spill.group, spill.page)

    def _poison(self, group: int, page: int) -> None:
        size = self.page_size
        for pool, g in zip(self.pools, self.groups, strict=True):
            if g == group:
                pool[page * size : (page + 1) * size] = [POISON] * size

    def poison_tail(self, slot: int) -> None:
        for tails in self.tails:
            tails[slot] = [POISON] * (2 * self.page_size)

    def carry_out(self, work: CacheWork, admit: Callable[[], None]) -> list[Entry]:
        """All that is done before a step; `admit` gives slots to their new owners."""
        self.seal(work.seal)
        if self.states is not None:
            self.states.save(work)
        spilled = self.read_out(work.spill)
        self.poison_pages(work.spill)
        self.fill(work.load)
        admit()
        self.restore(work.copies)
        if self.states is not None:
            self.states.finish(work)
        return spilled

    def seal(self, moves: Sequence[Move]) -> None:
        """Tails to pages, all at once: no slot may be the target of two."""
        ring = 2 * self.page_size
        targets: Counter[tuple[int, int]] = Counter()
        for move in moves:
            assert move.stop - move.start <= ring
            for layer, g in enumerate(self.groups):
                tail, pool = self.tails[layer][move.slot], self.pools[layer]
                for low, high in held(move.tables[g], move.start, move.stop):
                    slots = [i for run in move.tables[g].runs(low, high) for i in range(*run)]
                    targets.update((layer, slot) for slot in slots)
                    for slot, position in zip(slots, range(low, high), strict=True):
                        self._write(pool, slot, tail[position % ring])
        assert not targets or max(targets.values()) == 1, "two tails are moved to one page"

    def read_out(self, spills: Sequence[PageTransfer]) -> list[Entry]:
        """Evicted pages as bytes, one layer of their group after the other."""
        assert self.may_write_pages or not spills, "pages are read out while a step is in flight"
        size, spilled = self.page_size, []
        for spill in spills:
            if spill.group == len(self.windows):
                spilled.append(spill.filled(self.states.read(spill.page)))
                continue
            values = array("q")
            for layer, g in enumerate(self.groups):
                if g == spill.group:
                    start = spill.page * size
                    values.extend(self.read(layer, [(start, start + size)]))
            spilled.append(spill.filled(values.tobytes()))
        return spilled

    def fill(self, loads: Sequence[PageTransfer]) -> None:
        """Bytes to pages."""
        size = self.page_size
        for load in loads:
            if load.group == len(self.windows):
                self.states.load(load.page, load.entry.payload)
                continue
            values = iter(array("q", load.entry.payload.tobytes()))
            for layer, g in enumerate(self.groups):
                if g == load.group:
                    for slot in range(load.page * size, (load.page + 1) * size):
                        self._write(self.pools[layer], slot, next(values))

    def restore(self, restores: Sequence[Move]) -> None:
        """Beginnings of shared pages to a page and a tail of one's own; all read before written."""
        ring = 2 * self.page_size
        copies = []
        for restore in restores:
            for layer, g in enumerate(self.groups):
                page = restore.pages[g]
                if page is not None:
                    source = page * self.page_size
                    count = restore.stop - restore.start
                    values = self.read(layer, [(source, source + count)])
                    (target, _), *_ = restore.tables[g].runs(restore.start, restore.stop)
                    copies.append((layer, restore, target, values))
        for layer, restore, target, values in copies:
            tail = self.tails[layer][restore.slot]
            for i, value in enumerate(values):
                self._write(self.pools[layer], target + i, value)
                tail[(restore.start + i) % ring] = value

    def write(self, layer: int, segment: Segment, keys: Sequence[int]) -> None:
        """New tokens of a step: to the tail, or to pages and what fills no page to both."""
        in_tail = segment.num_tokens
        if segment.is_chunk:
            in_tail = min(in_tail, segment.stop % self.page_size)
            assert segment.sealed == segment.start - segment.start % self.page_size
            table = segment.tables[self.groups[layer]]
            slots = [i for run in table.runs(segment.start, segment.stop) for i in range(*run)]
            for slot, value in zip(slots, keys, strict=True):
                self._write(self.pools[layer], slot, value)
        tail = self.tails[layer][segment.slot]
        for position in range(segment.stop - in_tail, segment.stop):
            tail[position % (2 * self.page_size)] = keys[position - segment.start]

    def _write(self, pool: list[int], slot: int, value: int) -> None:
        assert self.may_write_pages, "pages are written while a step is in flight"
        pool[slot] = value

    def places(self, segment: Segment, group: int, position: int) -> Places:
        """Where the keys lie that a token of a segment sees."""
        window, table = self.windows[group], segment.tables[group]
        stop = position + 1
        sealed = stop if segment.is_chunk else min(segment.sealed, stop)
        runs = [run for part in window.ranges(position, sealed) for run in table.runs(*part)]
        lowest = window.lowest(position)
        tail = [
            p % (2 * self.page_size) for p in range(sealed, stop) if p >= lowest or p < window.sinks
        ]
        return runs, tail

    def read(self, layer: int, runs: Sequence[tuple[int, int]]) -> list[int]:
        pool = self.pools[layer]
        values = [value for start, stop in runs for value in pool[start:stop]]
        assert POISON not in values, "a page is read before it is written"
        return values

    def see(self, layer: int, slot: int, places: Places) -> int:
        """The sum of the keys at `places`."""
        runs, offsets = places
        tail = self.tails[layer][slot]
        values = [tail[offset] for offset in offsets]
        assert POISON not in values, "a tail is read before it is written"
        return sum(self.read(layer, runs)) + sum(values)


def held(table: PageTable, start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of positions [start, stop) that a window has not let go of."""
    edge, first = table.num_kept * table.page_size, table.first * table.page_size
    parts = [(start, min(stop, edge)), (max(start, first), stop)]
    return [(low, high) for low, high in parts if low < high]
