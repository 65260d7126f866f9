"""Pages of the prefix tree on disk: their names, which to fetch, and whether that pays. No mlx.

A page of tokens is one entry for each layer group. A window's pages are stored and read only where
a prompt can go on from them. Partial pages are not stored. If a model is spread over ranks, each
stores its part of a page under the same name, and a page counts as found if all ranks have it.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
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
    page_key,
)
from ..cache.inputs import PageTransfer
from ..cache.pages import PageGroup, PageTable, StateGroup
from ..cache.prefix import (
    Node,
    PrefixTree,
    RestorePoint,
    Rule,
    Snapshot,
    resume_point,
    span_rule,
)

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


Prompt = tuple[Hashable, list[int]]
"""A namespace and tokens. Pages are shared where both agree."""
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
        self.tokens_loaded = 0
        self.identity: tuple[str, ...] = ()  # what the bytes of pages depend on
        self._max_bytes, self._max_staged_bytes = max_bytes, max_staged_bytes
        self._clock = clock
        self._computing, self._reading = Rate(), Rate()  # tokens, bytes
        self._step_ended_s = 0.0
        self._read_meanwhile = False  # since the last step ended
        self._num_refused = 0

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

    # -- to the disk ----------------------------------------------------------------------------

    def root_key(self, namespace: Hashable) -> bytes:
        """The key from which the keys of a namespace's pages follow; each namespace has its own."""
        assert self.tier is not None
        root = self.tier.namespace
        return root if namespace is None else namespace_key(root.hex(), repr(namespace))

    def spills(
        self, node: Node, pages: Seq[int | None], snapshots: Iterable[Snapshot]
    ) -> list[PageTransfer]:
        """The parts of a page to read out and store, except those that the disk already has.

        Args:
            node: of the prefix tree.
            pages: by group, those that are meant.
            snapshots: likewise.
        """
        if self.tier is None or not self._max_bytes or len(node.tokens) < self.page_size:
            return []
        entries = self.entries_of(node)
        held = [(group, page) for group, page in enumerate(pages) if page is not None]
        held += [
            (self.state_group, snapshot.number)
            for snapshot in snapshots
            if snapshot.offset == self.page_size
        ]
        transfers = [PageTransfer(group, number, entries[group]) for group, number in held]
        return [each for each in transfers if not self.tier.stores(each.entry.key)]

    def key_of(self, node: Node) -> bytes:
        """The key of a page in memory, hashed once."""
        return node.chain_keys(self.root_key(node.namespace), page_key)[1]

    def entries_of(self, node: Node) -> list[Entry]:
        """By group, the entry of a page, without its payload; none of a partial page."""
        if len(node.tokens) < self.page_size:
            return []
        parent, key = node.chain_keys(self.root_key(node.namespace), page_key)
        groups = range(len(self.page_bytes))
        return [Entry(group_key(key, group), parent, node.tokens) for group in groups]

    def lacking(self, nodes: Iterable[Node]) -> list[PageTransfer]:
        """The entries of nodes that the disk lacks."""
        each = [self.spills(node, node.pages, node.snapshots.values()) for node in nodes]
        return [spill for spills in each for spill in spills]

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

    def find(self, token_ids: Seq[int], point: RestorePoint) -> Found | None:
        """Read the pages on disk that lengthen `point`; None: none do, or reading does not pay.

        Takes time in proportion to the prompt. If the disk knows nothing of it, one look at a file.
        """
        stop = (len(token_ids) - 1) // self.page_size
        if self.tier is None or stop - len(point.nodes) < MIN_PAGES:
            return None
        search = PageSearch(self, self.tier, token_ids, point, stop)
        while (num_pages := search.reachable()) - len(point.nodes) >= MIN_PAGES:
            wanted = search.wanted(num_pages)
            num_tokens = num_pages * self.page_size - point.num_tokens
            num_bytes = sum(self.page_bytes[group] for _, group in wanted)
            if not self.pays(num_tokens, self._reading.seconds_for(num_bytes)):
                return None
            if self._read(search, wanted):
                self.tokens_loaded += num_tokens
                return search.found(num_pages)
        return None

    def _read(self, search: "PageSearch", wanted: list[tuple[int, int]]) -> bool:
        """Read pages. False: one is missing, and the search knows it now."""
        started_s = self._clock()
        keys = [search.key(*place) for place in wanted]
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

    def places(self, ids: Seq[int], start: RestorePoint) -> tuple[int, list[tuple[int, int]]]:
        """Pages after which a prompt can go on from the disk alone; (page, group) of their entries.

        Args:
            ids: of the prompt.
            start: the beginning of its namespace.
        """
        assert self.tier is not None
        search = PageSearch(self, self.tier, ids, start, len(ids) // self.page_size)
        every = search.places(range(len(self.page_bytes)))
        search.there = {place: self.tier.stores(search.key(*place)) for place in every}
        num_pages = search.reachable()
        return num_pages, [place for place in every if place[0] < num_pages and search.has(*place)]

    def erase(self, ids: Seq[int], start: RestorePoint) -> None:
        """Remove the entries of a prompt, except those that saved sessions keep."""
        assert self.tier is not None
        search = PageSearch(self, self.tier, ids, start, len(ids) // self.page_size)
        for number in range(search.stop):
            for group in range(len(self.page_bytes)):
                self.tier.remove(search.key(number, group))

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


@dataclass(slots=True)
class PageSearch:
    """The pages of one prompt on the disk. Each place (page number, group) is looked for once.

    Attributes:
        offered: keys that count as there, too, because peers have them.
    """

    store: PageStore
    tier: DiskTier
    token_ids: Seq[int]
    point: RestorePoint
    stop: int  # pages
    there: dict[tuple[int, int], bool] = field(default_factory=dict)
    read: dict[tuple[int, int], Entry] = field(default_factory=dict)
    offered: Collection[bytes] = ()
    _keys: list[bytes] = field(default_factory=list)  # [n]: of the page before page n

    def reachable(self) -> int:
        """The most pages after which all groups can go on, from memory and disk together."""
        size, always = self.store.page_size, self.always
        rules = [self._rule(group) for group in range(len(self.store.page_bytes))]
        longest = self.stop * size
        for group in always:
            longest = rules[group](longest)
        sparse = [rule for group, rule in enumerate(rules) if group not in always]
        spans = [span_rule(*span) for span in self.point.spans]
        return resume_point(longest, [*sparse, *spans], alignment=size) // size

    @property
    def always(self) -> list[int]:
        """Groups in which every page is needed, because all later tokens see it."""
        return [g for g, group in enumerate(self.store.groups) if not group.recycles]

    def places(self, groups: Iterable[int]) -> list[tuple[int, int]]:
        """Places of groups after the prefix in memory, the first pages first."""
        numbers = range(len(self.point.nodes), self.stop)
        return [(number, group) for number in numbers for group in groups]

    def wanted(self, num_pages: int) -> list[tuple[int, int]]:
        """Places to be read for going on after `num_pages`, the first pages first."""
        return sorted(
            (number, group)
            for group in range(len(self.store.page_bytes))
            for number in self._needed(num_pages, group)
            if not self._in_memory(number, group) and (number, group) not in self.read
        )

    def found(self, num_pages: int) -> Found:
        """The needed pages that were read."""
        found: Found = [{} for _ in self.store.page_bytes]
        for group, pages in enumerate(found):
            for number in self._needed(num_pages, group):
                if (number, group) in self.read:
                    pages[number] = self.read[number, group]
        return found

    def key(self, number: int, group: int) -> bytes:
        """The key of a page's entry. Each page is hashed once, up to the last one asked for."""
        keys, size = self._keys, self.store.page_size
        if not keys:
            keys.append(self.store.root_key(self.point.namespace))
        for n in range(len(keys) - 1, number + 1):
            keys.append(page_key(keys[n], self.token_ids[n * size : (n + 1) * size]))
        return group_key(keys[number + 1], group)

    def _rule(self, group: int) -> Rule:
        """Where a group can go on, if it has the pages that are somewhere."""

        def held(number: int, tokens: int) -> int:
            return tokens if tokens == self.store.page_size and self.has(number, group) else 0

        if group == self.store.state_group:
            assert self.store.states is not None
            states, size = self.store.states, self.store.page_size
            return lambda point: states.last_resumable(point, held, size)
        return lambda point: self.store.groups[group].last_resumable(point, held)

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
        if number >= len(path):
            return False
        if group == self.store.state_group:
            return self.store.page_size in path[number].snapshots
        return path[number].pages[group] is not None


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
        self._loads: dict[
            tuple[int, int], PageTransfer
        ] = {}  # (group, page id) -> what is to go there

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

    def note_evicted(self, node: Node, pages: Seq[int | None], snapshots: Seq[Snapshot]) -> None:
        """Note an evicted page, to be stored, unless it waits for content from the disk."""
        places = [(g, i) for g, i in enumerate(pages) if i is not None]
        places += [(self._store.state_group, s.number) for s in snapshots]
        unfilled = {place for place in places if self._loads.pop(place, None)}
        self._spills += [
            spill
            for spill in self._store.spills(node, pages, snapshots)
            if (spill.group, spill.page) not in unfilled
        ]

    def all_of(self, tree: PrefixTree) -> list[PageTransfer]:
        """All pages that the tree has and the disk lacks, the ones used last and parents first."""
        for node in sorted(tree.nodes(), key=lambda node: (-node.tick, node.number)):
            self.note_evicted(node, node.pages, list(node.snapshots.values()))
        spills, self._spills = self._spills, []
        return spills

    def held(self, tree: PrefixTree, keys: Collection[bytes]) -> list[PageTransfer]:
        """Where the pages with these keys are in memory, of those that are.

        Costs a look at each node of the tree, and hashes of those that were never named.
        """
        page_keys = {group_key(key, 0) for key in keys}
        return [
            PageTransfer(group, page, entry)
            for node in tree.nodes()
            if self._store.key_of(node) in page_keys
            for group, entry in enumerate(self._store.entries_of(node))
            if entry.key in keys and (page := self._page_of(node, group)) is not None
        ]

    def _page_of(self, node: Node, group: int) -> int | None:
        if group < len(node.pages):
            return node.pages[group]
        snapshot = node.snapshots.get(self._store.page_size)
        return None if snapshot is None else snapshot.number

    # -- from the disk --------------------------------------------------------------------------

    def fetch(
        self,
        tree: PrefixTree,
        ids: list[int],
        point: RestorePoint,
        has_room: Callable[[RestorePoint], bool],
    ) -> None:
        """Put the pages of a prompt that only the disk has into the tree, if there is room.

        Args:
            tree: as it was when `point` was found.
            ids: of the prompt.
            point: where the prompt could go on from memory alone.
            has_room: whether it could begin there.
        """
        lease = tree.hold_path(point)
        if has_room(point):
            found = self._store.find(ids, point)
            counts = [len(pages) for pages in found[: len(self._groups)]] if found else []
            pages = self._allocate(tree, counts) if found else None
            if found and pages:
                self._insert(tree, (point.namespace, ids), found, pages)
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
        """Give pages to the tree, and note which entries will fill them."""
        runs: list[tuple[int, int, list[int]]] = []  # group, number of the first, page ids
        for group, numbers in enumerate(pages):
            read = found[group]
            for number, page in zip(read, numbers, strict=True):
                entry = read[number]
                self._loads[group, page] = PageTransfer(group, page, entry)
                last = runs[-1] if runs else None
                if last and last[0] == group and last[1] + len(last[2]) == number:
                    last[2].append(page)
                else:
                    runs.append((group, number, [page]))
        whole = [run for run in runs if not self._groups[run[0]].recycles]
        for some in [whole, *[[run] for run in runs if run not in whole]]:
            if some:
                self._insert_runs(tree, prompt, some)
        for states in found[len(pages) :]:
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
        namespace, ids = prompt
        tree.insert(namespace, ids[: stop * size], tables)
        for group, _, pages in runs:
            for page in set(pages).difference(tables[group].pages):  # the tree had an equal one
                self._loads.pop((group, page))

    def _insert_snapshot(self, tree: PrefixTree, prompt: Prompt, number: int, read: Entry) -> None:
        """The state after page `number`, where there is room for it."""
        snapshot = tree.add_snapshot(*prompt, (number + 1) * self._store.page_size)
        if snapshot is not None:
            place = self._store.state_group, snapshot.number
            self._loads[place] = PageTransfer(*place, read)
