"""The tiers below memory: a disk, and pages that peers sent. No mlx.

`PrefixCache` has the pages in memory, and every page has the same name everywhere. The tiers below
have one protocol: `has`, `load`, `store`. A page that memory evicts is stored on the disk. A prompt
whose pages lie below gets them loaded into pages of memory, unless computing them is quicker.

A page of tokens is one entry for each layer group. A window's pages are stored and read only where
a prompt can go on from them. Partial pages are not stored. If a model is spread over ranks, each
stores its part of a page under the same name, and a page counts as there if all ranks have it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..cache.disk import NOTHING_STORED, DiskTier, Entry, group_key, namespace_key
from ..cache.inputs import PageTransfer
from ..cache.pages import PageGroup, Spans, StateGroup, longest_prefix
from ..cache.prefix import Name, Page, PageNames, PagesByGroup, PrefixCache, RestorePoint
from .followers import FollowerDisks

MIN_PAGES = 2  # fewer are not worth a look at the disk
MAX_SPILL_BYTES = 128 * 2**20  # read out of the pools before one step, and held until they go
SAVE_CHUNK_BYTES = 64 * 2**20
SAVE_S = 10.0  # how long a shutdown may take to save what is cached
FORGET = 0.8  # weight of what was measured before, at each new measurement
TRIES = 16  # one in 16 fetches that seem too slow is made: a disk may have become quicker

GroupPage = tuple[int, int]
"""Page number, layer group."""


class Tier(Protocol):
    """A place below memory where pages lie under the keys of their entries. For any thread.

    Attributes:
        name: of the tier in `Reuse.tiers`.
    """

    name: str

    def has(self, key: bytes) -> bool:
        """Whether there is an entry; it may yet prove broken."""

    def load(self, keys: Seq[bytes]) -> list[Entry]:
        """The entries of the keys that exist. A tier may stop at the first missing one."""

    def store(self, entry: Entry) -> bool:
        """Keep an entry under its key; False: there is no room for it."""

    def remove(self, key: bytes) -> None:
        """Drop the entry of a key, unless a saved session keeps it."""


class ReceivedPages:
    """A tier of pages that peers sent. Each stays until it is loaded once; the oldest make room."""

    name = "peer"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def load(self, keys: Seq[bytes]) -> list[Entry]:
        with self._lock:
            return [entry for entry in map(self._take, keys) if entry is not None]

    def store(self, entry: Entry) -> bool:
        with self._lock:
            self._take(entry.key)
            self._entries[entry.key] = entry
            self._num_bytes += entry.payload.nbytes
            while self._num_bytes > self.max_bytes:
                self._take(next(iter(self._entries)))
            return entry.key in self._entries

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._take(key)

    def _take(self, key: bytes) -> Entry | None:
        entry = self._entries.pop(key, None)
        self._num_bytes -= 0 if entry is None else entry.payload.nbytes
        return entry


@dataclass(slots=True)
class Rate:
    """A measured speed: amounts and the seconds that they took, the latest weighted most."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = FORGET * self.amount + amount
        self.seconds = FORGET * self.seconds + seconds

    def seconds_for(self, amount: float) -> float | None:
        """How long `amount` would take; None: nothing was measured."""
        return amount * self.seconds / self.amount if self.amount else None


class PageStore:
    """The tiers below memory, and the pages that go there and come back before the next step.

    Args:
        disk: of this model and KV format; None, and opened later: the model's identity is not known
            yet, so that nothing is stored or found.
        states: of recurrent layers: their snapshots are entries, too; None: there are none.
        max_bytes: that the disk may hold; 0: there is no disk.
        max_received_bytes: pages from peers that may wait for their prompts.
        clock: seconds that only grow.

    Attributes:
        tiers: in the order in which they are asked; empty until the model's identity is known.
        root: the name that stands for the model; None: it is not known yet.
        on_open: gets that name once it is known.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        *,
        groups: Seq[PageGroup],
        states: StateGroup | None = None,
        max_bytes: int,
        max_received_bytes: int = 0,
        others: FollowerDisks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.others = others or FollowerDisks()
        self.groups = groups
        self.states = states
        self.page_bytes = [group.page_bytes for group in groups]
        self.page_bytes += [states.num_bytes] if states is not None else []
        self.page_size = groups[0].page_size
        self.tokens_loaded = 0
        self.identity: tuple[str, ...] = ()  # what the bytes of pages depend on
        self.received = ReceivedPages(max_received_bytes)
        self.on_open: Callable[[Name], None] = lambda root: None
        self._max_bytes = max_bytes
        self._clock = clock
        self._computing, self._reading = Rate(), Rate()  # tokens, bytes
        self._step_ended_s = 0.0
        self._read_meanwhile = False  # since the last step ended
        self._num_refused = 0
        self._spills: list[PageTransfer] = []
        self._loads: dict[tuple[int, int | None], PageTransfer] = {}  # by group and page id
        self._begin(None if disk is None else disk.namespace, disk)

    def _begin(self, root: Name | None, disk: DiskTier | None) -> None:
        self.root, self.disk = root, disk
        self.tiers: list[Tier] = [] if root is None else [self.received]
        self.tiers += [] if disk is None else [disk]

    def open(self, folder: str, identity: tuple[str, ...]) -> None:
        """Open the tiers for pages of this identity, on all ranks."""
        root, self.identity = namespace_key(*identity), identity
        self.others.open(folder, root, self._max_bytes)
        disk = DiskTier(folder, root, max_bytes=self._max_bytes) if self._max_bytes else None
        self._begin(root, disk)
        self.on_open(root)

    def close(self) -> None:
        """Stop the writer, until `open`. What it has not written within `SAVE_S` is lost."""
        if self.disk is not None:
            self.disk.close(SAVE_S)
        self._begin(None, None)

    def stats(self) -> dict[str, Any]:
        """Plain numbers; a page of tokens is an entry for each layer group."""
        disk = NOTHING_STORED if self.disk is None else self.disk.stats()
        return {**disk, "tokens_loaded": self.tokens_loaded}

    # -- before a step --------------------------------------------------------------------------

    def take(self) -> tuple[list[PageTransfer], list[PageTransfer]]:
        """Pages to be read out before the next step, and then those to be filled."""
        spills, loads = self.affordable(self._spills), list(self._loads.values())
        self.forget()
        return spills, loads

    def forget(self) -> None:
        self._spills, self._loads = [], {}

    def affordable(self, spills: Seq[PageTransfer]) -> list[PageTransfer]:
        """The last entries that fit into the memory for spilled pages, and at least one.

        The last entries of a path are those nearest to its beginning.
        """
        affordable: list[PageTransfer] = []
        room = MAX_SPILL_BYTES
        for spill in reversed(spills):
            room -= self.page_bytes[spill.group]
            if room < 0 and affordable:
                break
            affordable.append(spill)
        return affordable[::-1]

    # -- to the disk ----------------------------------------------------------------------------

    def note_evicted(self, page: Page, groups: Iterable[int]) -> None:
        """Note an evicted page, to be stored, unless it waits for content from a tier."""
        places = {(group, page.ids[group]) for group in groups}
        unfilled = {place for place in places if self._loads.pop(place, None)}
        filled = sorted(group for group, number in places if (group, number) not in unfilled)
        self._spills += self.lacking([page], filled)

    def transfers(self, page: Page, groups: Iterable[int]) -> list[PageTransfer]:
        """Where groups have a whole page, and its entries without payload; short pages: none."""
        if len(page.tokens) < self.page_size:
            return []
        held = [(group, page.ids[group], group_key(page.name, group)) for group in groups]
        return [
            PageTransfer(group, number, Entry(key, page.parent, page.tokens))
            for group, number, key in held
            if number is not None
        ]

    def lacking(
        self, pages: Iterable[Page], groups: Collection[int] | None = None
    ) -> list[PageTransfer]:
        """Transfers of the parts of pages that the disk lacks, of some groups (None: of all)."""
        if self.disk is None or not self._max_bytes:
            return []
        groups = range(len(self.page_bytes)) if groups is None else groups
        transfers = [transfer for page in pages for transfer in self.transfers(page, groups)]
        return [transfer for transfer in transfers if not self.disk.has(transfer.entry.key)]

    def in_memory(self, prefix: PrefixCache, keys: Iterable[bytes]) -> list[PageTransfer]:
        """Places in memory of the pages with these keys; missing ones are left out."""
        pages = [(prefix.page_of.get(group_key(key, 0)), key[-1]) for key in keys]
        known = [(page, group) for page, group in pages if page and group < len(page.ids)]
        return [transfer for page, group in known for transfer in self.transfers(page, [group])]

    def put(self, spilled: Iterable[Entry]) -> None:
        if self.disk is not None:
            for entry in spilled:
                self.disk.store(entry)

    def save(self, prefix: PrefixCache, read: Callable[[Seq[PageTransfer]], list[Entry]]) -> None:
        """Write all pages that the disk lacks, and wait for the writes.

        As many as bytes and seconds allow: first those that were used last, parents first.
        """
        if self.disk is None:
            return
        pages = sorted(prefix.page_of.values(), key=lambda page: (-page.tick, page.number))
        deadline_s = self._clock() + SAVE_S
        for chunk in self.chunks(self.lacking(pages)):
            left_s = max(deadline_s - self._clock(), 0.0)
            self.others.begin_save(chunk, left_s)
            self.put(read(chunk))
            written = self.disk.flush(max(deadline_s - self._clock(), 0.0))
            written &= self.others.end_save(max(deadline_s - self._clock(), 0.0))
            if not written:
                return

    def chunks(self, spills: Seq[PageTransfer]) -> Iterator[list[PageTransfer]]:
        """Pieces of a moderate size that the disk may hold."""
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

    # -- to memory ------------------------------------------------------------------------------

    def fetch(
        self, prefix: PrefixCache, point: RestorePoint, has_room: Callable[[RestorePoint], bool]
    ) -> dict[int, str]:
        """Bring the pages of a prompt that only tiers have into memory, if there is room.

        Args:
            prefix: as it was when `point` was found.
            has_room: whether it could begin there.

        Returns:
            Of pages that came, by number: the name of their tier.
        """
        users, tiers = prefix.hold_path(point), {}
        search = self.find(point) if has_room(point) else None
        if search is not None and self._make_room(prefix, loaded := search.loaded()):
            inserted = self._insert(prefix, point.names, loaded)
            tiers = search.tiers
            prefix.let_go(inserted, anchored=True)
        prefix.let_go(users, anchored=True)
        return tiers

    def _make_room(self, prefix: PrefixCache, loaded: dict[GroupPage, Entry]) -> bool:
        """Evict until each group has free pages for what was loaded; False: too many are needed."""
        counts = [sum(g == group for _, g in loaded) for group in prefix.attention]
        for group, (count, allocator) in enumerate(zip(counts, prefix.allocators, strict=True)):
            if count > allocator.num_free:
                prefix.evict(group, count - allocator.num_free)
        groups = zip(counts, prefix.allocators, strict=True)
        return all(count <= allocator.num_free for count, allocator in groups)

    def _insert(
        self, prefix: PrefixCache, names: PageNames, loaded: dict[GroupPage, Entry]
    ) -> PagesByGroup:
        users: PagesByGroup = {group: [] for group in prefix.attention}
        for group, allocator in enumerate(prefix.allocators):
            numbers = [number for number, g in loaded if g == group]
            for number, page_id in zip(numbers, allocator.allocate(len(numbers)), strict=True):
                page = prefix.insert(names, number, group, page_id)
                if page is None:
                    allocator.release([page_id])
                    continue
                users[group].append(page)
                self._loads[group, page_id] = PageTransfer(group, page_id, loaded[number, group])
        group = len(prefix.groups)  # of the states
        for number in [number for number, g in loaded if g == group]:
            page = prefix.add_state(names, (number + 1) * self.page_size)
            if page is not None and (state := page.ids[group]) is not None:
                self._loads[group, state] = PageTransfer(group, state, loaded[number, group])
        return users

    def find(self, point: RestorePoint) -> "PageSearch | None":
        """Load the pages in tiers that lengthen `point`; None: none do, or loading does not pay.

        Takes time in proportion to the prompt. If no tier knows anything of it, one look at a file.
        """
        stop = (len(point.names.token_ids) - 1) // self.page_size
        if not self.tiers or stop - point.num_pages < MIN_PAGES:
            return None
        search = PageSearch(self, point, stop)
        while (num_pages := search.reachable()) - point.num_pages >= MIN_PAGES:
            wanted = search.wanted(num_pages)
            num_tokens = num_pages * self.page_size - point.num_tokens
            num_bytes = sum(self.page_bytes[group] for _, group in wanted)
            if not self.pays(num_tokens, self._reading.seconds_for(num_bytes)):
                return None
            if self._load(search, wanted):
                self.tokens_loaded += num_tokens
                search.stop = num_pages
                return search
        return None

    def _load(self, search: "PageSearch", wanted: list[GroupPage]) -> bool:
        """Load pages. False: one is missing, and the search knows it now."""
        started_s = self._clock()
        keys = [search.key(*place) for place in wanted]
        self.others.begin_fetch([(place[1], k) for place, k in zip(wanted, keys, strict=True)])
        entries: dict[bytes, tuple[Entry, str]] = {}
        for tier in self.tiers:
            left = [key for key in keys if key not in entries]
            entries |= {entry.key: (entry, tier.name) for entry in tier.load(left)}
        missing = self.others.end_fetch()
        for index in missing:  # to be stored again, by all
            for tier in self.tiers:
                tier.remove(keys[index])
            entries.pop(keys[index], None)
        num_bytes = sum(entry.payload.nbytes for entry, _ in entries.values())
        self._reading.add(num_bytes, self._clock() - started_s)
        self._read_meanwhile = True
        lacking: list[GroupPage] = []
        for place, key in zip(wanted, keys, strict=True):
            entry, tier_name = entries.get(key, (None, ""))
            if entry is None or entry.payload.nbytes != self.page_bytes[place[1]]:
                lacking.append(place)
            else:
                search.read[place], search.tiers[place[0]] = entry, tier_name
        search.known.update(dict.fromkeys(lacking[:1], False))
        return not lacking

    def pays(self, num_tokens: int, reading_s: float | None) -> bool:
        computing_s = self.computing_s(num_tokens)
        if computing_s is None or reading_s is None or reading_s <= computing_s:
            return True
        self._num_refused += 1
        return self._num_refused % TRIES == 0

    def computing_s(self, num_tokens: int) -> float | None:
        """Seconds to compute `num_tokens` of a prompt here; None: nothing was measured."""
        return self._computing.seconds_for(num_tokens)

    def step_ended(self, *, num_prefill: int, num_tokens: int, began_s: float) -> None:
        """A step's tokens were read; it was planned at `began_s`, behind the step before it."""
        now = self._clock()
        if 2 * num_prefill > num_tokens and not self._read_meanwhile:
            self._computing.add(num_tokens, now - max(began_s, self._step_ended_s))
        self._step_ended_s, self._read_meanwhile = now, False

    # -- saved prompts --------------------------------------------------------------------------

    def places(self, names: PageNames, disk: DiskTier) -> tuple[int, list[GroupPage]]:
        """Pages after which a prompt can go on from the disk alone; places of their entries."""
        stop, groups = len(names.token_ids) // self.page_size, range(len(self.page_bytes))
        places = [(number, group) for number in range(stop) for group in groups]
        stored = {place for place in places if disk.has(key_of(names, *place))}
        num_pages = self.reachable(stop, lambda number, group: (number, group) in stored)
        return num_pages, [place for place in places if place[0] < num_pages and place in stored]

    def reachable(self, stop: int, has: Callable[[int, int], bool], spans: Spans = ()) -> int:
        """The largest number of pages, up to `stop`, behind which all groups can resume.

        Args:
            stop: pages.
        """
        size = self.page_size

        def held(group: int, start: int, stop: int) -> int:
            numbers = range(start // size, stop // size)
            return next((n * size for n in numbers if not has(n, group)), stop - stop % size)

        longest = longest_prefix(
            stop * size, self.groups, self.states, held, spans=spans, alignment=size
        )
        return longest // size


def key_of(names: PageNames, number: int, group: int) -> bytes:
    return group_key(names.name(number), group)


@dataclass(slots=True)
class PageSearch:
    """The pages of one prompt in all tiers. Each place is looked for once."""

    store: PageStore
    point: RestorePoint  # what memory has of it
    stop: int  # pages, those in memory included
    # places that were looked for below memory; whether a tier has them
    known: dict[GroupPage, bool] = field(default_factory=dict)
    read: dict[GroupPage, Entry] = field(default_factory=dict)  # entries that were loaded
    # page number -> the name of the tier from which it came
    tiers: dict[int, str] = field(default_factory=dict)
    offered: Collection[bytes] = ()  # keys that count as there, too, because peers have them

    def key(self, number: int, group: int) -> bytes:
        return key_of(self.point.names, number, group)

    def has(self, number: int, group: int) -> bool:
        if self.point.holds(number, group):
            return True
        place = number, group
        if place not in self.known:
            key = self.key(*place)
            self.known[place] = any(tier.has(key) for tier in self.store.tiers)
        return self.known[place] or self.key(*place) in self.offered

    def reachable(self) -> int:
        """The most pages after which all groups can go on, from memory and tiers together."""
        return self.store.reachable(self.stop, self.has, self.point.spans)

    def places(self, groups: Iterable[int]) -> list[GroupPage]:
        """Places of groups after the prefix in memory, the first pages first."""
        groups = list(groups)
        return [(n, group) for n in range(self.point.num_pages, self.stop) for group in groups]

    def wanted(self, num_pages: int) -> list[GroupPage]:
        """Places to be read for going on after `num_pages`, the first pages first."""
        needed = self._needed(num_pages)
        return sorted(p for p in needed if not self.point.holds(*p) and p not in self.read)

    def loaded(self) -> dict[GroupPage, Entry]:
        return {place: self.read[place] for place in self._needed(self.stop) if place in self.read}

    def _needed(self, num_pages: int) -> list[GroupPage]:
        """Pages that the token after `num_pages` needs, by group; for states, the last page."""
        store = self.store
        needed = [
            (number, group)
            for group, pages in enumerate(store.groups)
            for number in pages.needed_pages(num_pages * store.page_size)
        ]
        has_state = store.states is not None and num_pages
        return [*needed, (num_pages - 1, len(store.groups))] if has_state else needed
