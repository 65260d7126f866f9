"""Token prefix -> pages: match, lock, extend, evict. Pure Python; knows no arrays and no requests.

The tree is a trie of pages. A page that was inserted belongs to the tree. A sequence that uses it
holds a lease on its path, and nothing on a leased path is evicted. A windowed page may go before
its node does.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from ..pages import PageGroup, PageTable, StateGroup
from .node import (
    Node,
    RestorePoint,
    Rule,
    Snapshot,
    Spans,
    resume_point,
    span_rule,
)
from .store import Lease, NodeStore

OnEvict = Callable[[Node, Sequence[int | None], Sequence[Snapshot]], None]
"""Of a node, the pages by group and the snapshots that go; before they are released."""


class PrefixTree(NodeStore):
    """Prefix cache over the pages of all layer groups.

    Args:
        groups, states: as of `NodeStore`.
        clock: likewise; by default uses are counted.
        on_evict: gets nodes that go as a whole, and snapshots that go alone, in which case there
            are no pages. The deepest of a path come first. Windowed pages that go alone are left
            out.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        *,
        clock: Callable[[], int] | None = None,
        on_evict: OnEvict | None = None,
        states: StateGroup | None = None,
    ) -> None:
        super().__init__(groups, clock or itertools.count(1).__next__, states)
        whole_pages = any(group.whole_pages for group in groups)
        self._alignment = self.page_size if whole_pages else 1  # of positions to go on from
        self.tokens_reused = 0  # of matches that were made use of
        self._on_evict = on_evict or (lambda node, pages, snapshots: None)

    # -- reading --------------------------------------------------------------------------------

    def probe(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        *,
        limit: int | None = None,
        whole_pages: bool = False,
        spans: Spans = (),
    ) -> RestorePoint:
        """The longest reusable prefix of at most `limit` tokens. Locks, counts, changes nothing.

        First whole pages are matched, then the child that agrees for longest. From there it goes
        back to the last position at which every group can resume.

        The last token of a prompt must be computed, so the default limit is one less than its
        length. The time depends on the length of the prompt, and not on the size of the tree.

        Args:
            namespace: of the prompt; nothing is shared between two.
            token_ids: of the prompt, from position 0.
            limit: tokens.
            whole_pages: end at the end of a page, even if all groups could go on inside of one.
            spans: of the prompt; none is cut.
        """
        highest = len(token_ids) - 1 if limit is None else min(limit, len(token_ids))
        boundary, size = max(highest, 0), self.page_size
        path, overlap = _walk(self.roots.get(namespace), token_ids, boundary, size)
        num_whole = len(path) - (overlap > 0)
        longest = num_whole * size + overlap
        rules = [*self._rules(path), *[span_rule(*span) for span in spans]]
        point = resume_point(longest, rules, size if whole_pages else self._alignment)
        number, inside = divmod(point, size)
        last = path[number] if inside else path[number - 1] if number else None
        return RestorePoint(
            namespace=namespace,
            num_tokens=point,
            num_matched=longest,
            nodes=path[:number],
            path=path[:num_whole],
            cut=path[number] if inside else None,
            cut_tokens=inside,
            snapshot=last.snapshots[inside or size] if self.states is not None and last else None,
            first=[max(group.first_page(point), group.num_kept) for group in self.groups],
            num_kept=list(self.num_kept),
            page_size=size,
            spans=spans,
        )

    def _rules(self, path: Sequence[Node]) -> list[Rule]:
        """Where each group can resume; groups that keep all pages resume anywhere."""

        def lowers(group: int) -> Rule:
            return lambda point: self.groups[group].last_resumable(
                point, lambda number, tokens: path[number].held(group, tokens)
            )

        rules = [lowers(group) for group in self.windowed]
        if (states := self.states) is not None:
            rules.append(
                lambda point: states.last_resumable(
                    point, lambda number, tokens: path[number].last_snapshot(tokens), self.page_size
                )
            )
        return rules

    def num_evictable(self, group: int) -> int:
        """Pages of a group that `evict` could free now."""
        loose = self.loose.get(group)
        return self.num_unlocked if loose is None else len(loose)

    # -- leases ---------------------------------------------------------------------------------

    def count(self, match: RestorePoint) -> None:
        """Count a match that is used. A match may also be locked in vain."""
        self.tokens_reused += match.num_tokens

    def hold_path(self, point: RestorePoint) -> Lease:
        """Keep all whole pages that agreed with a prompt, with every page of their windows."""
        whole = replace(
            point, nodes=point.path, cut=None, snapshot=None, first=list(point.num_kept)
        )
        return self.lock(whole)

    # -- growing --------------------------------------------------------------------------------

    def extend(
        self,
        lease: Lease,
        token_ids: Sequence[int],
        tables: Sequence[PageTable],
        *,
        num_tokens: int,
    ) -> bool:
        """Hand over the whole pages of the first `num_tokens` positions that are not in yet.

        They stay protected by the lease, which grows by them. Where the tree has an equal page, it
        takes the place of the caller's in the table, and the caller's is released. Page numbers
        that a table recycled are left out, and are no longer protected for this lease.

        Costs what is new. After `clear`, a lease from before takes nothing.

        Args:
            lease: of the sequence; its `num_pages` tells what was handed over before.
            token_ids: from position 0.
            tables: by group; a table that sees everything has every page.
            num_tokens: positions that have keys and values in pages, or will be once the steps
                launched so far have run.

        Returns:
            Whether a page was replaced by an equal one.
        """
        for group in self.windowed:
            self.trim(lease, group, tables[group].first)
        if not self.up_to_date(lease):
            return False
        size, replaced = self.page_size, False
        for number in range(lease.num_pages, num_tokens // size):
            tokens = tuple(token_ids[number * size : (number + 1) * size])
            own = [table.page_at(number) for table in tables]
            node = lease.tip.children.get(tokens)
            if node is None:
                node = self.add(lease.tip, tokens, own, lease.priority)
            else:
                self.lock_node(node)
                replaced |= self._merge(node, tables)
            self.grow(lease, node)
        return replaced

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
        if not self.up_to_date(lease):
            return False
        assert num_tokens - start < self.page_size
        tokens = tuple(token_ids[start:num_tokens])
        if not tokens or lease.tip.covers(tokens):
            return False
        own = [table.page_at(lease.num_pages) for table in tables]
        node = self.add(lease.tip, tokens, own, lease.priority)
        node.anchored = [True] * len(own)
        for group in self.windowed:
            self.offer_window(node, group, node.tick)
        self.unlock_node(node, node.tick)
        return True

    def add_snapshot(
        self, namespace: Hashable, token_ids: Sequence[int], num_tokens: int
    ) -> Snapshot | None:
        """Make room for the state after the first `num_tokens` tokens. The tree must have them all.

        If there is no room, the snapshot that was unused for longest is evicted. Takes time in
        proportion to `num_tokens`.

        Returns:
            None: the tree has one there already, does not have the tokens, or has no room.
        """
        node, start = self.roots.get(namespace), 0
        while node is not None and num_tokens - start > self.page_size:
            node = node.children.get(tuple(token_ids[start : start + self.page_size]))
            start += self.page_size
        tokens = tuple(token_ids[start:num_tokens])
        child, overlap = node.closest(tokens) if node is not None else (None, 0)
        if child is None or overlap < len(tokens) or self.states is None:
            return None
        if len(tokens) in child.snapshots:
            self.offer_snapshot(child.snapshots[len(tokens)], self.clock())
            return None
        if not self.states.has_room and not self.evict_snapshot():
            return None
        return self.put_snapshot(child, len(tokens))

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Give up a snapshot that another one replaces, unless a lease holds it or it is gone."""
        if snapshot.node.snapshots.get(snapshot.offset) is snapshot and not snapshot.holds:
            self.drop_snapshot(snapshot)

    def insert(
        self, namespace: Hashable, token_ids: Sequence[int], tables: Sequence[PageTable]
    ) -> None:
        """Hand over the whole pages of a sequence in one go, without a lease."""
        lease = self.lock(self.probe(namespace, (), limit=0))
        self.extend(lease, token_ids, tables, num_tokens=len(token_ids))
        self.unlock(lease)

    def _merge(self, node: Node, tables: Sequence[PageTable]) -> bool:
        """Fill the gaps of a node with a sequence's own pages; a page that it has replaces one."""
        replaced = False
        for group, table in enumerate(tables):
            page, had = table.page_at(node.number), node.pages[group]
            if page is None:
                continue
            if had is None:
                self.fill(node, group, page)
            else:
                assert had != page, "handed over twice"
                table.replace(node.number, had)
                self.allocators[group].release([page])
                replaced = True
        return replaced

    # -- eviction -------------------------------------------------------------------------------

    def evict(self, group: int, num_pages: int) -> int:
        """Free at least `num_pages` pages of a group if that many may go; how many were freed.

        Leaves of no lease go first, lowest priority first, then the longest unused. Of a windowed
        group, pages that sequences have passed by go before those that a sequence resumed or ended
        at, each kind lowest priority first. They leave their node in place, unless it is a leaf of
        no lease.
        """
        queue = self.loose.get(group, self.leaves)
        gone: list[Node] = []
        freed = 0
        while freed < num_pages and (node := queue.pop()) is not None:
            freed += 1
            if node.evictable:
                gone += self.remove(node)
            else:
                self.release([node], [group])
                self.strand(node, group)
        try:
            for node in gone:
                self._on_evict(node, node.pages, list(node.snapshots.values()))
        finally:
            self.release(gone)
        return freed

    def evict_snapshot(self) -> bool:
        """Evict the snapshot that is least worth keeping; False: leases hold all of them."""
        snapshot = self.snapshots.pop()
        if snapshot is None:
            return False
        try:
            self._on_evict(snapshot.node, (), [snapshot])
        finally:
            self.drop_snapshot(snapshot)
        return True


def _walk(
    root: Node | None, token_ids: Sequence[int], boundary: int, page_size: int
) -> tuple[list[Node], int]:
    """The pages that agree with the prompt; and of the last, if it is cut, how many tokens."""
    path: list[Node] = []
    node, overlap = root, 0
    while node is not None:
        start = len(path) * page_size
        tokens = tuple(token_ids[start : min(start + page_size, boundary)])
        child = node.children.get(tokens) if len(tokens) == page_size else None
        if child is None:
            child, overlap = node.closest(tokens)
            path += [child] if child else []
            break
        path.append(child)
        node = child
    return path, overlap
