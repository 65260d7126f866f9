"""Named pages on disk: which to store, which to fetch, and whether that pays. No mlx.

A page of tokens is one entry for each layer group. A window's pages are stored and read only where
a prompt can go on from them. Partial pages are not stored. If a model is spread over ranks, each
stores its part of a page under the same name, and a page counts as found if all ranks have it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from ..cache.disk import (
    NOTHING_STORED,
    DiskTier,
    Entry,
    NoFiles,
    group_key,
    namespace_key,
)
from ..cache.inputs import PageTransfer
from ..cache.pages import PageGroup, Spans, StateGroup, longest_prefix
from ..cache.prefix import Name, Page, PageNames, PrefixCache, RestorePoint, Users

MIN_PAGES = 2  # fewer are not worth a look at the disk
MAX_SPILL_BYTES = 128 * 2**20  # read out of the pools before one step, and held until they go
SAVE_CHUNK_BYTES = 64 * 2**20
SAVE_S = 10.0  # how long a shutdown may take to save what is cached
FORGET = 0.8  # weight of what was measured before, at each new measurement
TRIES = 16  # of so many fetches that seem too slow, one is made: a disk may have become quicker


@dataclass(slots=True)
class Rate:
    """A measured speed: amounts and the seconds that they took, the latest weighted most."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        self.amount = FORGET * self.amount + amount
        self.seconds = FORGET * self.seconds + seconds

    def seconds_for(self, amount: float) -> float | None:
        """How long `amount` would take; None: nothing was measured."""
        return amount * self.seconds / self.amount if self.amount else None


Found = list[dict[int, Entry]]
"""Pages on the disk that lengthen the prefix of a prompt: by group, page number -> payload."""


class FollowerDisks:
    """The disks of the other ranks of a model, each with its part of every page. Here: no others.

    Attributes:
        form: how the model is divided among them, as text: pages of another division are of no use.
    """

    form = ""

    def open(self, folder: str, namespace: bytes, max_bytes: int) -> None:
        """Let the other ranks open a folder of this path."""

    def begin_fetch(self, places: Seq[tuple[int, bytes]]) -> None:
        """Let the other ranks read (group, key), for the step that comes next."""

    def end_fetch(self) -> list[int]:
        """Places that one of them lacks, or found broken, in order."""
        return []

    def begin_save(self, spills: Seq[PageTransfer], timeout_s: float) -> None:
        """Let the other ranks store pages, and wait for the writes."""

    def end_save(self, timeout_s: float) -> bool:
        """Wait for `begin_save`; whether every rank has written its part."""
        return True


NO_DISKS = FollowerDisks()


class PageStore:
    """Names for pages, and a disk tier under them.

    Args:
        tier: of this model and KV format; None, and set later: the model's identity is not known
            yet, so that nothing is stored or found.
        groups: what layers keep in pages.
        states: of recurrent layers: their snapshots are entries, too; None: there are none.
        max_bytes: what the tier may hold; 0: there is no disk.
        max_staged_bytes: pages from peers that may wait for their prompts.
        others: disks of other ranks.
        clock: seconds that only grow.

    Attributes:
        on_open: gets the name of the model once it is known.
    """

    def __init__(
        self,
        tier: DiskTier | None,
        *,
        groups: Seq[PageGroup],
        states: StateGroup | None = None,
        max_bytes: int,
        max_staged_bytes: int = 0,
        others: FollowerDisks = NO_DISKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.others = others
        self.groups = groups
        self.states = states
        self.state_group = len(groups)  # its number among the groups of entries
        self.page_bytes = [group.page_bytes for group in groups]
        self.page_bytes += [states.num_bytes] if states is not None else []
        self.page_size = groups[0].page_size
        self.always = [g for g, group in enumerate(groups) if not group.recycles]  # need all pages
        self.tokens_loaded = 0
        self.identity: tuple[str, ...] = ()  # what the bytes of pages depend on
        self._max_bytes, self._max_staged_bytes = max_bytes, max_staged_bytes
        self._clock = clock
        self._computing, self._reading = Rate(), Rate()  # tokens, bytes
        self._step_ended_s = 0.0
        self._read_meanwhile = False  # since the last step ended
        self._num_refused = 0
        self.on_open: Callable[[Name], None] = lambda root: None

    def open(self, folder: str, identity: tuple[str, ...]) -> None:
        """Open the tier for pages of this identity, on all ranks."""
        namespace, self.identity = namespace_key(*identity), identity
        self.others.open(folder, namespace, self._max_bytes)
        self.tier = DiskTier(
            folder,
            namespace,
            max_bytes=self._max_bytes,
            max_staged_bytes=self._max_staged_bytes,
            files=None if self._max_bytes else NoFiles(),
        )
        self.on_open(namespace)

    # -- to the disk ----------------------------------------------------------------------------

    @property
    def root(self) -> Name | None:
        """The name that stands for the model; None: it is not known yet."""
        return None if self.tier is None else self.tier.namespace

    def spills(self, page: Page, groups: Iterable[int]) -> list[PageTransfer]:
        """What groups have of a page, to be read out and stored, but for what the disk has."""
        if self.tier is None or not self._max_bytes:
            return []
        transfers = self.transfers(page, groups)
        return [each for each in transfers if not self.tier.stores(each.entry.key)]

    def transfers(self, page: Page, groups: Iterable[int]) -> list[PageTransfer]:
        """Where groups have a page, and its entries without their payload; none of a short page."""
        if len(page.tokens) < self.page_size:
            return []
        held = [(group, page.ids[group], group_key(page.name, group)) for group in groups]
        return [
            PageTransfer(group, number, Entry(key, page.parent, page.tokens))
            for group, number, key in held
            if number is not None
        ]

    def lacking(self, pages: Iterable[Page]) -> list[PageTransfer]:
        """The entries of pages that the disk lacks."""
        every = range(len(self.page_bytes))
        return [spill for page in pages for spill in self.spills(page, every)]

    def affordable(self, spills: Seq[PageTransfer]) -> list[PageTransfer]:
        """As many of the last entries as may be held, and at least one.

        The last entries of a path are those nearest to its beginning.
        """
        kept: list[PageTransfer] = []
        room = MAX_SPILL_BYTES
        for spill in reversed(spills):
            room -= self.page_bytes[spill.group]
            if room < 0 and kept:
                break
            kept.append(spill)
        return kept[::-1]

    def put(self, spilled: Iterable[Entry]) -> None:
        """Queue entries to be written."""
        if self.tier is not None:
            for entry in spilled:
                self.tier.put(entry)

    def save(
        self, spills: Seq[PageTransfer], read: Callable[[Seq[PageTransfer]], list[Entry]]
    ) -> None:
        """Write as many as bytes and seconds allow, in their order, and wait for the writes."""
        if self.tier is None:
            return
        deadline_s = self._clock() + SAVE_S
        for chunk in self.chunks(spills):
            left_s = max(deadline_s - self._clock(), 0.0)
            self.others.begin_save(chunk, left_s)
            self.put(read(chunk))
            written = self.tier.flush(max(deadline_s - self._clock(), 0.0))
            written &= self.others.end_save(max(deadline_s - self._clock(), 0.0))
            if not written:
                return

    def chunks(self, spills: Seq[PageTransfer]) -> Iterator[list[PageTransfer]]:
        """Pieces of a moderate size, as far as the disk may hold them."""
        chunk: list[PageTransfer] = []
        room, total = SAVE_CHUNK_BYTES, self._max_bytes
        for spill in spills:
            room -= self.page_bytes[spill.group]
            total -= self.page_bytes[spill.group]
            if total < 0:
                break
            chunk.append(spill)
            if room <= 0:
                yield chunk
                chunk, room = [], SAVE_CHUNK_BYTES
        yield chunk

    # -- from the disk --------------------------------------------------------------------------

    def find(self, point: RestorePoint) -> "PageSearch | None":
        """Read the pages on disk that lengthen `point`; None: none do, or reading does not pay.

        Takes time in proportion to the prompt. If the disk knows nothing of it, one look at a file.
        """
        stop = (len(point.names.token_ids) - 1) // self.page_size
        if self.tier is None or stop - point.num_pages < MIN_PAGES:
            return None
        search = PageSearch(self, self.tier, point, stop)
        while (num_pages := search.reachable()) - point.num_pages >= MIN_PAGES:
            wanted = search.wanted(num_pages)
            num_tokens = num_pages * self.page_size - point.num_tokens
            num_bytes = sum(self.page_bytes[group] for _, group in wanted)
            if not self.pays(num_tokens, self._reading.seconds_for(num_bytes)):
                return None
            if self._read(search, wanted):
                self.tokens_loaded += num_tokens
                search.stop = num_pages
                return search
        return None

    def _read(self, search: "PageSearch", wanted: list[tuple[int, int]]) -> bool:
        """Read pages. False: one is missing, and the search knows it now."""
        started_s = self._clock()
        keys = [search.key(*place) for place in wanted]
        for (number, _), key in zip(wanted, keys, strict=True):
            search.tiers[number] = "peer" if search.tier.is_staged(key) else "disk"
        self.others.begin_fetch([(place[1], k) for place, k in zip(wanted, keys, strict=True)])
        entries = search.tier.get_chain(keys)
        missing = self.others.end_fetch()
        count = min([len(entries), *missing])
        for lacking in missing:  # to be stored again, by all
            search.tier.remove(keys[lacking])
        self._reading.add(sum(e.payload.nbytes for e in entries), self._clock() - started_s)
        self._read_meanwhile = True
        for place, entry in zip(wanted, entries[:count], strict=False):
            if entry.payload.nbytes != self.page_bytes[place[1]]:
                search.there[place] = False
                return False
            search.read[place] = entry
        if count < len(wanted):
            search.there[wanted[count]] = False
        return count == len(wanted)

    def pays(self, num_tokens: int, reading_s: float | None) -> bool:
        """Whether reading is expected to be quicker than computing."""
        computing_s = self.computing_s(num_tokens)
        if computing_s is None or reading_s is None or reading_s <= computing_s:
            return True
        self._num_refused += 1
        return self._num_refused % TRIES == 0

    def computing_s(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens of a prompt take here; None: nothing was measured."""
        return self._computing.seconds_for(num_tokens)

    def step_ended(self, *, num_prefill: int, num_tokens: int, began_s: float) -> None:
        """A step's tokens were read; it was launched at `began_s`, behind the step before it."""
        now = self._clock()
        if 2 * num_prefill > num_tokens and not self._read_meanwhile:
            self._computing.add(num_tokens, now - max(began_s, self._step_ended_s))
        self._step_ended_s, self._read_meanwhile = now, False

    # -- saved prompts --------------------------------------------------------------------------

    def places(self, names: PageNames) -> tuple[int, list[tuple[int, int]]]:
        """Pages after which a prompt can go on from the disk alone; places of their entries."""
        assert self.tier is not None
        stop, groups = len(names.token_ids) // self.page_size, range(len(self.page_bytes))
        every = [(number, group) for number in range(stop) for group in groups]
        on_disk = {place for place in every if self.tier.stores(key_of(names, *place))}
        num_pages = self.reachable(stop, lambda number, group: (number, group) in on_disk)
        return num_pages, [place for place in every if place[0] < num_pages and place in on_disk]

    def reachable(self, stop: int, has: Callable[[int, int], bool], spans: Spans = ()) -> int:
        """The most pages, up to `stop`, after which all groups can go on with the pages there are.

        Args:
            stop: pages.
            has: whether there is the page of a number and group.
            spans: of the prompt; none is cut.
        """
        size = self.page_size

        def held(group: int, number: int, count: int) -> int:
            return count if count == size and has(number, group) else 0

        longest = longest_prefix(
            stop * size, self.groups, self.states, held, spans=spans, alignment=size
        )
        return longest // size

    def erase(self, names: PageNames) -> None:
        """Remove the entries of a prompt, except those that saved sessions keep."""
        assert self.tier is not None
        for number in range(len(names.token_ids) // self.page_size):
            for group in range(len(self.page_bytes)):
                self.tier.remove(key_of(names, number, group))

    # -- the end --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain numbers; a page of tokens is an entry for each layer group."""
        found = NOTHING_STORED if self.tier is None else self.tier.stats()
        return {**found, "tokens_loaded": self.tokens_loaded}

    def close(self) -> None:
        """Stop the writer, until `open`. What it has not written within `SAVE_S` is lost."""
        if self.tier is not None:
            self.tier.close(SAVE_S)
            self.tier = None


def key_of(names: PageNames, number: int, group: int) -> bytes:
    return group_key(names.name(number), group)


@dataclass(slots=True)
class PageSearch:
    """The pages of one prompt on the disk. Each place (page number, group) is looked for once.

    Attributes:
        tiers: page number -> "disk" or "peer", where what was read of it lay.
        offered: keys that count as there, too, because peers have them.
    """

    store: PageStore
    tier: DiskTier
    point: RestorePoint
    stop: int  # pages
    there: dict[tuple[int, int], bool] = field(default_factory=dict)
    read: dict[tuple[int, int], Entry] = field(default_factory=dict)
    tiers: dict[int, str] = field(default_factory=dict)
    offered: Collection[bytes] = ()

    def reachable(self) -> int:
        """The most pages after which all groups can go on, from memory and disk together."""
        return self.store.reachable(self.stop, self.has, self.point.spans)

    def places(self, groups: Seq[int]) -> list[tuple[int, int]]:
        """Places of groups after the prefix in memory, the first pages first."""
        numbers = range(self.point.num_pages, self.stop)
        return [(number, group) for number in numbers for group in groups]

    def wanted(self, num_pages: int) -> list[tuple[int, int]]:
        """Places to be read for going on after `num_pages`, the first pages first."""
        return sorted(
            (number, group)
            for group in range(len(self.store.page_bytes))
            for number in self._needed(num_pages, group)
            if not self._in_memory(number, group) and (number, group) not in self.read
        )

    def found(self) -> Found:
        """What was read of the pages that are needed to go on after all `stop` pages."""
        found: Found = []
        for group in range(len(self.store.page_bytes)):
            numbers = [n for n in self._needed(self.stop, group) if (n, group) in self.read]
            found.append({number: self.read[number, group] for number in numbers})
        return found

    def key(self, number: int, group: int) -> bytes:
        """The key of a page's entry."""
        return key_of(self.point.names, number, group)

    def _needed(self, num_pages: int, group: int) -> Seq[int]:
        """Page numbers of a group that the token after `num_pages` needs; of a state, the last."""
        if group == self.store.state_group:
            return [num_pages - 1] if num_pages else []
        return self.store.groups[group].needed_pages(num_pages * self.store.page_size)

    def has(self, number: int, group: int) -> bool:
        """Whether a page is in memory, on the disk, or at a peer."""
        if self._in_memory(number, group):
            return True
        place = number, group
        if place not in self.there:
            self.there[place] = self.tier.contains(self.key(*place))
        return self.there[place] or self.key(*place) in self.offered

    def _in_memory(self, number: int, group: int) -> bool:
        path = self.point.path
        page = path[number] if number < len(path) else None
        return page is not None and page.ids[group] is not None


class Transfers:
    """Pages to read out before they are written over, and pages to fill from the disk.

    Args:
        store: where pages go and come from.
        groups: what layers keep in pages.
    """

    def __init__(self, store: PageStore, groups: Seq[PageGroup]) -> None:
        self._store = store
        self._groups = groups
        self._allocators = [group.allocator for group in groups]
        self._spills: list[PageTransfer] = []
        self._loads: dict[tuple[int, int | None], PageTransfer] = {}  # by group and page id

    def take(self) -> tuple[list[PageTransfer], list[PageTransfer]]:
        """Pages to be read out before the next step, and then those to be filled."""
        spills = self._store.affordable(self._spills)
        loads = list(self._loads.values())
        self.forget()
        return spills, loads

    def forget(self) -> None:
        """Drop all transfers."""
        self._spills, self._loads = [], {}

    # -- to the disk ----------------------------------------------------------------------------

    def note_evicted(self, page: Page, groups: Iterable[int]) -> None:
        """Note an evicted page, to be stored, unless it waits for content from the disk."""
        places = {(group, page.ids[group]) for group in groups}
        unfilled = {place for place in places if self._loads.pop(place, None)}
        filled = sorted(group for group, number in places if (group, number) not in unfilled)
        self._spills += self._store.spills(page, filled)

    def all_of(self, prefix: PrefixCache) -> list[PageTransfer]:
        """All pages that memory has and the disk lacks, the ones used last and parents first."""
        pages = sorted(prefix.page_of.values(), key=lambda page: (-page.tick, page.number))
        return self._store.lacking(pages)

    def held(self, prefix: PrefixCache, keys: Iterable[bytes]) -> list[PageTransfer]:
        """Where the pages with these keys are in memory, of those that are."""
        pages = [(prefix.page_of.get(group_key(key, 0)), key[-1]) for key in keys]
        known = [(page, g) for page, g in pages if page and g < len(page.ids)]
        return [each for page, group in known for each in self._store.transfers(page, [group])]

    # -- from the disk --------------------------------------------------------------------------

    def fetch(
        self, prefix: PrefixCache, point: RestorePoint, has_room: Callable[[RestorePoint], bool]
    ) -> dict[int, str]:
        """Bring the pages of a prompt that only the disk has into memory, if there is room.

        Args:
            prefix: as it was when `point` was found.
            point: where the prompt could go on from memory alone.
            has_room: whether it could begin there.

        Returns:
            Of pages that came, by number: "disk" or "peer".
        """
        users, tiers = prefix.hold_path(point), {}
        search = self._store.find(point) if has_room(point) else None
        if search is not None and self._make_room(prefix, found := search.found()):
            users += self._insert(prefix, point.names, found)
            tiers = search.tiers
        prefix.let_go(users, anchored=True)
        return tiers

    def _make_room(self, prefix: PrefixCache, found: Found) -> bool:
        """Evict until each group has free pages for what was found; False: too many are needed."""
        for group, (allocator, entries) in enumerate(zip(self._allocators, found, strict=False)):
            if len(entries) > allocator.num_free:
                prefix.evict(group, len(entries) - allocator.num_free)
        rooms = zip(self._allocators, found, strict=False)
        return all(len(entries) <= allocator.num_free for allocator, entries in rooms)

    def _insert(self, prefix: PrefixCache, names: PageNames, found: Found) -> Users:
        """Name pages, and note which entries will fill them."""
        users: Users = []
        for group, allocator in enumerate(self._allocators):
            entries, places = found[group], allocator.allocate(len(found[group]))
            for (number, entry), own in zip(entries.items(), places, strict=True):
                page = prefix.insert(names, number, group, own)
                if page is None:
                    allocator.release([own])
                    continue
                users.append((page, group))
                self._loads[group, own] = PageTransfer(group, own, entry)
        for states in found[len(self._allocators) :]:
            for number, entry in states.items():
                page = prefix.add_state(names, (number + 1) * self._store.page_size)
                if page is not None and (state := page.ids[-1]) is not None:
                    place = self._store.state_group, state
                    self._loads[place] = PageTransfer(*place, entry)
        return users
