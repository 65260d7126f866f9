"""The nodes of a prefix tree: which are leased, which may be evicted, and in which order.

Nothing on a leased path is evicted. A window needs only its last pages, so leases protect windowed
pages one by one. Nodes that may go as a whole (leaves without a lock) are in one eviction queue.
For each windowed group another queue has the pages that no lease needs.
"""

import heapq
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..pages import PageGroup, StateGroup
from .node import Node, RestorePoint, Snapshot, Tokens

STRANDED = -sys.maxsize  # lower than any priority

Item = TypeVar("Item")


class EvictionQueue(Generic[Item]):
    """A priority queue of distinct items that can be taken out: a heap that skips stale
    entries, and sweeps them out when they outnumber the others. O(log n) each, amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Item]] = []
        self._entry: dict[Item, int] = {}  # item -> the entry of it that counts
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entry)

    def items(self) -> set[Item]:
        """All items."""
        return set(self._entry)

    def push(self, item: Item, worth: tuple[int, ...]) -> None:
        """Put an item in, or change its worth; among equals the first one in is the first out."""
        self._num_pushed += 1
        self._entry[item] = self._num_pushed
        heapq.heappush(self._heap, (worth, self._num_pushed, item))
        if len(self._heap) > 2 * len(self._entry) + 64:
            self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Take an item out, if it is in."""
        self._entry.pop(item, None)

    def pop(self) -> Item | None:
        """Take out the item of least worth; None: the queue is empty."""
        while self._heap:
            _, serial, item = heapq.heappop(self._heap)
            if self._entry.get(item) == serial:
                del self._entry[item]
                return item
        return None


@dataclass(slots=True, eq=False)
class Lease:
    """The pages that one sequence keeps in the tree: a path, and where its windows begin.

    `nodes[n]` is page number n. In a windowed group g the lease protects the sinks' pages and the
    pages from number `first[g]` on. In other groups it protects all pages.
    """

    root: Node
    nodes: list[Node]
    first: list[int]
    cut: Node | None
    snapshot: Snapshot | None
    priority: int
    epoch: int
    released: bool = False

    @property
    def num_pages(self) -> int:
        """Whole pages of the sequence that belong to the tree; later ones are the sequence's."""
        return len(self.nodes)

    @property
    def tip(self) -> Node:
        """The last node of the path."""
        return self.nodes[-1] if self.nodes else self.root


class NodeStore:
    """Nodes, the leases on them, and the pages that belong to them.

    Args:
        groups: what layers keep in pages, and where these come from and go back to.
        clock: ever larger numbers, to order uses by.
        states: of the state layers; None: there are none.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        clock: Callable[[], int],
        states: StateGroup | None = None,
    ) -> None:
        assert groups
        self.groups = groups
        self.allocators = [group.allocator for group in groups]
        self.page_size = groups[0].page_size
        self.num_kept = [group.num_kept for group in groups]
        self.clock = clock
        self.states = states
        self.snapshots: EvictionQueue[Snapshot] = EvictionQueue()  # those that no lease holds
        self.windowed = [g for g, group in enumerate(groups) if group.recycles]
        self.roots: dict[Hashable, Node] = {}
        self._epoch = 0  # of leases: how often the tree was cleared
        self.num_nodes = 0
        self.num_unlocked = 0
        self._num_pages = [0] * len(groups)
        self.leaves: EvictionQueue[Node] = EvictionQueue()
        self.loose: dict[int, EvictionQueue[Node]] = {g: EvictionQueue() for g in self.windowed}

    def root(self, namespace: Hashable) -> Node:
        """The root of a namespace; made where there is none, and then to be locked at once."""
        if namespace not in self.roots:
            self.roots[namespace] = Node(namespace, None, (), [None] * len(self.groups))
        return self.roots[namespace]

    def num_pages(self, group: int) -> int:
        """Pages of a group that belong to the tree."""
        return self._num_pages[group]

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # -- leases ---------------------------------------------------------------------------------

    def lock(self, match: RestorePoint, *, priority: int = 0) -> Lease:
        """Protect what a match found until `unlock`. The match must be fresh, and may be empty.

        Its pages are evicted after all pages of a lower priority, see `evict`.
        """
        root = self.root(match.namespace)
        lease = Lease(
            root=root,
            nodes=list(match.nodes),
            first=list(match.first),
            cut=match.cut,
            snapshot=match.snapshot,
            priority=priority,
            epoch=self._epoch,
        )
        cut = [match.cut] if match.cut else []
        for node in [root, *match.nodes, *cut]:
            assert node.alive, "the tree changed between match and lock"
            self.lock_node(node)
        if match.snapshot is not None:
            self.hold_snapshot(match.snapshot)
        for group in self.windowed:
            for node in self._protected(lease, group) + cut:
                node.anchored[group] = True
                self.hold(node, group)
        return lease

    def grow(self, lease: Lease, node: Node) -> None:
        """Add a node to the path of a lease, as its new tip; the node was locked for it."""
        number = lease.num_pages
        lease.nodes.append(node)
        for group in self.windowed:
            if number >= lease.first[group] or number < self.num_kept[group]:
                self.hold(node, group)

    def trim(self, lease: Lease, group: int, first: int) -> None:
        """A window moved on: the lease needs no page of `group` before page number `first`."""
        passed = lease.nodes[lease.first[group] : first]
        lease.first[group] = max(lease.first[group], first)
        now = self.clock() if passed else 0
        for node in passed:
            self.unhold(node, group, now)

    def release_cut(self, lease: Lease) -> None:
        """Stop protecting the cut page and the snapshot: copies of them are launched.

        `unlock` does so too.
        """
        cut, snapshot, now = lease.cut, lease.snapshot, self.clock()
        lease.cut = lease.snapshot = None
        if snapshot is not None:
            self.unhold_snapshot(snapshot, now)
        if cut is None:
            return
        cut.raise_priority(lease.priority)
        for group in self.windowed:
            self.unhold(cut, group, now)
        self.unlock_node(cut, now)

    def unlock(self, lease: Lease) -> None:
        """End a lease. Its pages count as just used."""
        assert not lease.released
        lease.released = True
        self.release_cut(lease)
        now = self.clock()
        for node in [lease.root, *lease.nodes]:  # before any of their pages is queued by it
            node.raise_priority(lease.priority)
        for group in self.windowed:
            for node in self._protected(lease, group):
                node.anchored[group] = True  # the next to go on from here needs it
                self.unhold(node, group, now)
        for node in reversed(lease.nodes):
            self.unlock_node(node, now)
        self.unlock_node(lease.root, now)

    def up_to_date(self, lease: Lease) -> bool:
        """Whether a lease was taken since the tree was cleared last."""
        return lease.epoch == self._epoch

    def _protected(self, lease: Lease, group: int) -> list[Node]:
        """The nodes whose pages of a windowed group a lease needs: sinks, and the window."""
        return lease.nodes[: self.num_kept[group]] + lease.nodes[lease.first[group] :]

    # -- in use ---------------------------------------------------------------------------------

    def lock_node(self, node: Node) -> None:
        """Count one more lease on a node."""
        node.locks += 1
        if node.locks == 1 and node.parent is not None:
            self.num_unlocked -= node.alive
            self.leaves.discard(node)

    def unlock_node(self, node: Node, now: int) -> None:
        """Count one lease less; `now` is the time of last use. Children before parents."""
        node.locks -= 1
        assert node.locks >= 0
        node.tick = now
        if node.locks:
            return
        if not node.alive:
            self.release([node])
        elif node.parent is None:
            self._drop_root(node)
        else:
            self.num_unlocked += 1
            self.offer(node)

    def hold(self, node: Node, group: int) -> None:
        """Count one more lease that needs a windowed page."""
        node.holds[group] += 1
        self.loose[group].discard(node)

    def unhold(self, node: Node, group: int, now: int) -> None:
        """Count one lease less that needs a windowed page."""
        node.holds[group] -= 1
        assert node.holds[group] >= 0
        if node.alive:
            self.offer_window(node, group, now)
        elif not node.holds[group]:
            self.release([node], [group])

    def hold_snapshot(self, snapshot: Snapshot) -> None:
        """Count one more lease that goes on from a snapshot."""
        snapshot.holds += 1
        self.snapshots.discard(snapshot)

    def unhold_snapshot(self, snapshot: Snapshot, now: int) -> None:
        """Count one lease less that goes on from a snapshot."""
        snapshot.holds -= 1
        assert snapshot.holds >= 0
        if not snapshot.holds:
            if snapshot.node.alive:
                self.offer_snapshot(snapshot, now)
            else:
                self.drop_snapshot(snapshot)

    def offer_snapshot(self, snapshot: Snapshot, now: int) -> None:
        """Put a snapshot that was just used among those that may be evicted."""
        snapshot.tick = now
        if not snapshot.holds:
            self.snapshots.push(snapshot, (snapshot.node.priority, now))

    def strand(self, node: Node, group: int) -> None:
        """A window lost the page of a node, so no prompt can resume at the snapshots behind it.

        These snapshots are the first to be evicted.
        """
        sees_others = self.groups[group].window.size != 1
        for snapshot in node.snapshots.values() if sees_others else ():
            if not snapshot.holds:
                self.snapshots.push(snapshot, (STRANDED, snapshot.tick))

    def offer(self, node: Node) -> None:
        """Put a node among those that may be evicted, if it may; without a page it is removed."""
        if not node.evictable:
            return
        if node.empty:
            self.release(self.remove(node))
        else:
            self.leaves.push(node, (node.priority, node.tick))

    def offer_window(self, node: Node, group: int, now: int) -> None:
        """Put a windowed page among those that may be evicted; the deepest of a path goes first."""
        if node.pages[group] is not None and not node.holds[group]:
            self.loose[group].push(node, (node.anchored[group], node.priority, now, -node.number))

    # -- coming and going -----------------------------------------------------------------------

    def add(self, parent: Node, tokens: Tokens, pages: list[int | None], priority: int) -> Node:
        """Add a node, locked by its maker as its parent is.

        Partial leaves that it begins with make room for it, and leave it their snapshots.
        """
        assert parent.locks
        assert all(page is not None for g, page in enumerate(pages) if g not in self.windowed)
        node = Node(parent.namespace, parent, tokens, pages)
        for shorter in parent.shorter(tokens):
            if shorter.evictable:
                for snapshot in shorter.snapshots.values():  # it is one of the longer page, too
                    snapshot.node = node
                node.snapshots.update(shorter.snapshots)
                shorter.snapshots = {}
                self.detach(shorter)
                self.release([shorter])
        node.attach()
        node.priority, node.tick = priority, self.clock()
        node.locks = 1
        self.num_nodes += 1
        for group, page in enumerate(pages):
            self._num_pages[group] += page is not None
        return node

    def fill(self, node: Node, group: int, page: int) -> None:
        """Give a node a windowed page that it had lost."""
        assert node.pages[group] is None
        node.pages[group] = page
        self._num_pages[group] += 1
        for snapshot in node.snapshots.values():
            self.offer_snapshot(snapshot, snapshot.tick)
        self.offer_window(node, group, self.clock())

    def put_snapshot(self, node: Node, offset: int) -> Snapshot:
        """Add a snapshot after `offset` tokens of a node; there is room for it."""
        assert self.states is not None
        snapshot = Snapshot(node, offset, self.states.allocate(), self.clock())
        node.snapshots[offset] = snapshot
        self.offer_snapshot(snapshot, snapshot.tick)
        return snapshot

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Take a snapshot that no lease holds from its node."""
        assert self.states is not None
        assert not snapshot.holds
        self.snapshots.discard(snapshot)
        del snapshot.node.snapshots[snapshot.offset]
        self.states.release(snapshot.number)

    def remove(self, node: Node) -> list[Node]:
        """Take out an evictable node, and those above that then are leaves without any page.

        Their pages are still to be released.
        """
        removed: list[Node] = []
        while node.evictable and (not removed or node.empty):
            self.detach(node)
            removed.append(node)
            assert node.parent is not None
            node = node.parent
        if node.parent is None:
            self._drop_root(node)
        else:
            self.offer(node)
        return removed

    def detach(self, node: Node) -> None:
        """Take out one evictable node; its parent is not looked at, its pages not released."""
        assert node.evictable
        node.detach()
        self.num_nodes -= 1
        self.num_unlocked -= 1
        self.leaves.discard(node)
        for loose in self.loose.values():
            loose.discard(node)

    def release(self, nodes: Sequence[Node], groups: Sequence[int] | None = None) -> None:
        """Give the pages of nodes (of some groups) back to their allocators.

        Without `groups`, their snapshots go as well.
        """
        for node in nodes if groups is None else ():
            for snapshot in list(node.snapshots.values()):
                self.drop_snapshot(snapshot)
        for group in range(len(self.groups)) if groups is None else groups:
            pages = [page for node in nodes if (page := node.pages[group]) is not None]
            for node in nodes:
                node.pages[group] = None
            self._num_pages[group] -= len(pages)
            self.allocators[group].release(pages)

    def clear(self) -> None:
        """Take out all nodes: no prompt finds them, and they are released with their last lease.

        Older leases still protect their pages, and grow no more.
        """
        for node in list(self.nodes()):
            node.alive = False
            self.leaves.discard(node)
            for loose in self.loose.values():
                loose.discard(node)
            used = [
                node.holds[group] if group in self.windowed else node.locks
                for group in range(len(self.groups))
            ]
            self.release([node], [group for group, users in enumerate(used) if not users])
            for snapshot in [s for s in node.snapshots.values() if not s.holds]:
                self.drop_snapshot(snapshot)
        for root in self.roots.values():
            root.alive = False
        self.roots.clear()
        self.num_nodes = self.num_unlocked = 0
        self._epoch += 1

    def _drop_root(self, root: Node) -> None:
        if not root.children and not root.locks:
            del self.roots[root.namespace]
