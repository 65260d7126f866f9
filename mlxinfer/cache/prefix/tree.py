"""Token prefix -> pages: match, lock, extend, evict. Pure Python; knows no arrays and no requests.

A trie of pages. Once inserted, a page belongs to the tree; a sequence that uses it holds a
lease on the path to it, and nothing on a leased path is evicted. A windowed page may go before its
node does.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..pages import PageAllocator, PageTable, StateGroup
from .node import Node, RestorePoint, Snapshot, StoredPage, TreeShape, find
from .store import Lease, NodeStore

OnEvict = Callable[[list[StoredPage]], None]


@dataclass(slots=True)
class PrefixCounters:
    """Counts since the tree was built."""

    hits: int = 0  # counted matches of something
    misses: int = 0  # counted matches of nothing
    tokens_reused: int = 0
    nodes_inserted: int = 0
    nodes_evicted: int = 0
    windows_dropped: int = 0  # windowed pages that went before their node


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A page that the tree had already: use `tree` in place of `own`, and release `own`."""

    group: int
    page_number: int
    own: int
    tree: int


class PrefixTree:
    """Prefix cache over the pages of all layer groups.

    Args:
        allocators: where the pages of each group come from and go back to.
        windows: for each group how many positions a token sees (itself included), None for all.
        page_size: tokens a page.
        num_kept: for each group how many pages at the front its window never recycles (sinks);
            none where left out.
        clock: ever larger numbers, to order uses by.
        on_evict: gets whole nodes that go, and snapshots that go alone, before they are released.
            The deepest of a path come first. Windowed pages that go alone are left out.
        states: of the state layers; None: there are none.
    """

    def __init__(
        self,
        allocators: Sequence[PageAllocator],
        *,
        windows: Sequence[int | None],
        page_size: int,
        num_kept: Sequence[int] | None = None,
        clock: Callable[[], int] | None = None,
        on_evict: OnEvict | None = None,
        states: StateGroup | None = None,
    ) -> None:
        assert len(allocators) == len(windows) > 0
        assert page_size > 0
        self.page_size = page_size
        self.counters = PrefixCounters()
        self._store = NodeStore(
            allocators,
            windows,
            num_kept or [0] * len(windows),
            clock or itertools.count(1).__next__,
            states,
        )
        self._states = states
        num_kept = self._store.num_kept
        self._shape = TreeShape(windows, num_kept, page_size, has_states=states is not None)
        self._on_evict = on_evict

    # -- reading --------------------------------------------------------------------------------

    def probe(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        *,
        limit: int | None = None,
        alignment: int = 1,
    ) -> RestorePoint:
        """The longest reusable prefix of at most `limit` tokens; locks, counts, changes nothing.

        A prompt leaves its last token to be computed: the default limit is one less than its
        length. Costs the length of the prompt, whatever the tree holds.

        Args:
            namespace: of the prompt; nothing is shared between two.
            token_ids: of the prompt, from position 0.
            limit: tokens.
            alignment: of the number of tokens.
        """
        highest = len(token_ids) - 1 if limit is None else min(limit, len(token_ids))
        return find(
            self._store.roots.get(namespace),
            namespace,
            token_ids,
            self._shape,
            boundary=max(highest, 0),
            alignment=alignment,
        )

    @property
    def num_nodes(self) -> int:
        """Pages of tokens."""
        return self._store.num_nodes

    def num_pages(self, group: int) -> int:
        """Pages of a group that belong to the tree."""
        return self._store.num_pages[group]

    def num_evictable(self, group: int) -> int:
        """Pages of a group that `evict` could free now."""
        loose = self._store.loose.get(group)
        return self._store.num_unlocked if loose is None else len(loose)

    def stored(self) -> Iterator[StoredPage]:
        """All pages, parents before children. The tree must not change meanwhile."""
        return map(StoredPage, self._store.nodes())

    def check(self) -> None:
        """Assert all invariants. Costs the size of the tree."""
        self._store.check()
        for node in self._store.nodes():
            assert len(node.tokens) <= self.page_size
            assert len(node.tokens) == self.page_size or not node.children

    # -- leases ---------------------------------------------------------------------------------

    def lock(self, match: RestorePoint, *, priority: int = 0) -> Lease:
        """Protect what a match found until `unlock`. The match must be fresh, and may be empty.

        Its pages are evicted after all pages of a lower priority, see `evict`.
        """
        return self._store.take(match, priority)

    def count(self, match: RestorePoint) -> None:
        """Count a match that is made use of; one may be locked in vain."""
        self.counters.tokens_reused += match.num_tokens
        if match.num_tokens:
            self.counters.hits += 1
        else:
            self.counters.misses += 1

    def hold_path(self, point: RestorePoint) -> Lease:
        """Keep all whole pages that agreed with a prompt, with every page of their windows."""
        whole = replace(
            point, nodes=point.path, cut=None, snapshot=None, first=list(point.num_kept)
        )
        return self._store.take(whole, 0)

    def unlock(self, lease: Lease) -> None:
        """End a lease; what it protected counts as just used."""
        self._store.end(lease)

    def release_cut(self, lease: Lease) -> None:
        """Stop protecting the cut page and the snapshot: copies of them are launched.

        `unlock` does so too.
        """
        self._store.release_cut(lease)

    def trim(self, lease: Lease, group: int, first: int) -> None:
        """A window moved on: the lease needs no page of `group` before page number `first`."""
        self._store.trim(lease, group, first)

    # -- growing --------------------------------------------------------------------------------

    def extend(
        self,
        lease: Lease,
        token_ids: Sequence[int],
        tables: Sequence[PageTable],
        *,
        num_tokens: int,
    ) -> list[Duplicate]:
        """Hand over the whole pages of the first `num_tokens` positions that are not in yet.

        They stay protected by the lease, which grows by them. Where the tree has an equal page,
        the caller's is not taken: put `tree` in the table in place of `own`, which is the
        caller's to release. Page numbers that a table recycled are left out,
        and are no longer protected for this lease.

        Costs what is new. After `clear`, a lease from before takes nothing.

        Args:
            lease: of the sequence; its `num_pages` tells what was handed over before.
            token_ids: from position 0.
            tables: by group; a table that sees everything has every page.
            num_tokens: positions that have keys and values in pages, or will be once the steps
                launched so far have run.
        """
        for group in self._store.windowed:
            self.trim(lease, group, tables[group].first)
        duplicates: list[Duplicate] = []
        if not self._store.up_to_date(lease):
            return duplicates
        size = self.page_size
        for number in range(lease.num_pages, num_tokens // size):
            tokens = tuple(token_ids[number * size : (number + 1) * size])
            own = [table.page_at(number) for table in tables]
            node = lease.tip.children.get(tokens)
            if node is None:
                node = self._store.add(lease.tip, tokens, own, lease.priority)
                self.counters.nodes_inserted += 1
            else:
                self._store.lock(node)
                duplicates += self._merge(node, own)
            self._store.grow(lease, node)
        return duplicates

    def add_partial(
        self,
        lease: Lease,
        token_ids: Sequence[int],
        tables: Sequence[PageTable],
        *,
        num_tokens: int,
    ) -> bool:
        """Hand over the last page, begun but not full, for good: it is never written again.

        Call it after `extend`, when the sequence ends. Not protected, not part of the lease.

        Returns:
            Whether the tree took it. False: there is no such page, or the tree has one that
            begins like it; the caller's page stays the caller's.
        """
        start = lease.num_pages * self.page_size
        if not self._store.up_to_date(lease):
            return False
        assert num_tokens - start < self.page_size
        tokens = tuple(token_ids[start:num_tokens])
        if not tokens or lease.tip.covers(tokens):
            return False
        own = [table.page_at(lease.num_pages) for table in tables]
        node = self._store.add(lease.tip, tokens, own, lease.priority)
        self.counters.nodes_inserted += 1
        node.anchored = [True] * len(own)
        for group in self._store.windowed:
            self._store.offer_window(node, group, node.tick)
        self._store.unlock(node, node.tick)
        return True

    def add_snapshot(
        self, namespace: Hashable, token_ids: Sequence[int], num_tokens: int
    ) -> Snapshot | None:
        """Make room for the state after the first `num_tokens` tokens, all of which the tree has.

        The longest unused snapshot is evicted where there is no room. Costs `num_tokens`.

        Returns:
            None: the tree has one there already, does not have the tokens, or has no room.
        """
        node, start = self._store.roots.get(namespace), 0
        while node is not None and num_tokens - start > self.page_size:
            node = node.children.get(tuple(token_ids[start : start + self.page_size]))
            start += self.page_size
        tokens = tuple(token_ids[start:num_tokens])
        child, overlap = node.closest(tokens) if node is not None else (None, 0)
        if child is None or overlap < len(tokens) or self._states is None:
            return None
        if len(tokens) in child.snapshots:
            self._store.offer_snapshot(child.snapshots[len(tokens)], self._store.clock())
            return None
        if not self._states.has_room and not self.evict_snapshot():
            return None
        return self._store.add_snapshot(child, len(tokens))

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Give up a snapshot that another one replaces, unless a lease holds it or it is gone."""
        if snapshot.node.snapshots.get(snapshot.offset) is snapshot and not snapshot.holds:
            self._store.remove_snapshot(snapshot)

    def insert(
        self, namespace: Hashable, token_ids: Sequence[int], tables: Sequence[PageTable]
    ) -> list[Duplicate]:
        """Hand over the whole pages of a sequence in one go, without a lease."""
        lease = self.lock(self.probe(namespace, (), limit=0))
        duplicates = self.extend(lease, token_ids, tables, num_tokens=len(token_ids))
        self.unlock(lease)
        return duplicates

    def _merge(self, node: Node, own: list[int | None]) -> list[Duplicate]:
        """Fill the gaps of a node with a sequence's own pages; what it has is a duplicate."""
        duplicates = []
        for group, page in enumerate(own):
            had = node.pages[group]
            if page is None:
                continue
            if had is None:
                self._store.fill(node, group, page)
            else:
                assert had != page, "handed over twice"
                duplicates.append(Duplicate(group, node.number, page, had))
        return duplicates

    # -- eviction -------------------------------------------------------------------------------

    def evict(self, group: int, num_pages: int) -> int:
        """Free at least `num_pages` pages of a group if that many may go; how many were freed.

        Leaves of no lease go first, lowest priority first, then the longest unused. Of a windowed
        group, pages that sequences have passed by go before those that a sequence resumed or ended
        at, and among each of these lowest priority first; they leave their node in place, unless it
        is a leaf of no lease.
        """
        queue = self._store.loose.get(group, self._store.leaves)
        gone: list[Node] = []
        freed = 0
        while freed < num_pages and (node := queue.pop()) is not None:
            freed += 1
            if node.evictable:
                gone += self._store.remove(node)
            else:
                self._store.release([node], [group])
                self._store.strand(node, group)
                self.counters.windows_dropped += 1
        self.counters.nodes_evicted += len(gone)
        try:
            if self._on_evict is not None and gone:
                self._on_evict([StoredPage(node) for node in gone])
        finally:
            self._store.release(gone)
        return freed

    def evict_snapshot(self) -> bool:
        """Give up the snapshot that is least worth keeping; False: leases hold all of them."""
        snapshot = self._store.snapshots.pop()
        if snapshot is None:
            return False
        try:
            if self._on_evict is not None:
                self._on_evict([StoredPage(snapshot.node, alone=snapshot)])
        finally:
            self._store.remove_snapshot(snapshot)
        return True

    def clear(self) -> None:
        """Drop all nodes; pages under a lease are not found any more, and released when it ends."""
        self._store.clear()
