"""Leases on a prefix tree: paths in use, and where their windows begin. Knows no tokens.

Nothing on a leased path is evicted. A window needs its last pages only, so leases protect windowed
pages one by one.
"""

from dataclasses import dataclass

from .match import RestorePoint
from .node import Node, Snapshot
from .store import NodeStore


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence (or one pin) keeps in the tree: a path, and where its windows begin.

    `nodes[n]` is page number n. Of a windowed group g the sinks' pages and those from number
    `first[g]` on are protected, of the others all.
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


class Leases:
    """Takes, grows and ends leases on the nodes of a store."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._epoch = 0

    def take(self, match: RestorePoint, priority: int) -> Lease:
        """Protect what a match found; it must be fresh, and may be empty."""
        root = self._store.root(match.namespace)
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
            self._store.lock(node)
        if match.snapshot is not None:
            self._store.hold_snapshot(match.snapshot)
        for group in self._store.windowed:
            for node in self._protected(lease, group) + cut:
                node.anchored[group] = True
                self._store.hold(node, group)
        return lease

    def grow(self, lease: Lease, node: Node) -> None:
        """The path goes on with a node that was locked for it, and is its tip from now on."""
        number = lease.num_pages
        lease.nodes.append(node)
        for group in self._store.windowed:
            if number >= lease.first[group] or number < self._store.num_kept[group]:
                self._store.hold(node, group)

    def trim(self, lease: Lease, group: int, first: int) -> None:
        """A window moved on: the lease needs no page of `group` before page number `first`."""
        passed = lease.nodes[lease.first[group] : first]
        lease.first[group] = max(lease.first[group], first)
        now = self._store.clock() if passed else 0
        for node in passed:
            self._store.unhold(node, group, now)

    def release_cut(self, lease: Lease) -> None:
        """Stop protecting the cut page and the snapshot."""
        cut, lease.cut = lease.cut, None
        snapshot, lease.snapshot = lease.snapshot, None
        if snapshot is not None:
            self._store.unhold_snapshot(snapshot, self._store.clock())
        if cut is None:
            return
        now = self._store.clock()
        cut.raise_priority(lease.priority)
        for group in self._store.windowed:
            self._store.unhold(cut, group, now)
        self._store.unlock(cut, now)

    def end(self, lease: Lease) -> None:
        """Protect nothing more; what was protected counts as just used."""
        assert not lease.released
        lease.released = True
        self.release_cut(lease)
        now = self._store.clock()
        for node in [lease.root, *lease.nodes]:  # before any of their pages is queued by it
            node.raise_priority(lease.priority)
        for group in self._store.windowed:
            for node in self._protected(lease, group):
                node.anchored[group] = True  # the next to go on from here needs it
                self._store.unhold(node, group, now)
        for node in reversed(lease.nodes):
            self._store.unlock(node, now)
        self._store.unlock(lease.root, now)

    def outdate(self) -> None:
        """The tree was cleared: leases of before protect what they protected, and grow no more."""
        self._epoch += 1

    def up_to_date(self, lease: Lease) -> bool:
        """Whether a lease was taken since the tree was cleared last."""
        return lease.epoch == self._epoch

    def _protected(self, lease: Lease, group: int) -> list[Node]:
        """The nodes whose page of a windowed group a lease needs: sinks, and the window."""
        return lease.nodes[: self._store.num_kept[group]] + lease.nodes[lease.first[group] :]
