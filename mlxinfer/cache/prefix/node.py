"""One page of tokens in a prefix tree, and its children. Knows tokens and page ids, no policy."""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


class Node:
    """A page of tokens under its parent; a root has no tokens and is number -1.

    `locks` counts the leases that have it on their path. A page of a windowed group is needed for a
    part of that time only, so `holds` counts the leases that need it.
    """

    __slots__ = (
        "alive",
        "anchored",
        "children",
        "digest",
        "holds",
        "locks",
        "namespace",
        "number",
        "order",
        "pages",
        "parent",
        "priority",
        "snapshots",
        "tick",
        "tokens",
    )

    def __init__(
        self, namespace: Hashable, parent: "Node | None", tokens: Tokens, pages: list[int | None]
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.number: int = -1 if parent is None else parent.number + 1  # position // page_size
        self.pages = pages  # one per group; None: recycled by its window
        self.children: dict[Tokens, Node] = {}
        self.order: list[Tokens] = []  # keys of the children, sorted
        self.locks = 0
        self.holds = [0] * len(pages)  # of windowed groups
        self.anchored = [False] * len(pages)  # a sequence resumed or ended where it is needed
        self.priority = 0
        self.tick = 0  # when it was last in use
        self.alive = True  # in the tree
        self.digest: bytes | None = None
        self.snapshots: dict[int, Snapshot] = {}  # by how many of its tokens they are after

    def raise_priority(self, priority: int) -> None:
        """A sequence of this priority used it."""
        self.priority = max(self.priority, priority)

    @property
    def evictable(self) -> bool:
        """Whether it may go as a whole now."""
        return not self.locks and not self.children and self.parent is not None

    @property
    def empty(self) -> bool:
        """Whether it holds no page of any group."""
        return all(page is None for page in self.pages)

    def attach(self) -> None:
        """Put it among its parent's children."""
        assert self.parent is not None
        self.parent.children[self.tokens] = self
        insort(self.parent.order, self.tokens)

    def detach(self) -> None:
        """Take it from its parent's children; it still knows its parent."""
        assert self.parent is not None
        del self.parent.children[self.tokens]
        del self.parent.order[bisect_left(self.parent.order, self.tokens)]
        self.alive = False

    def closest(self, tokens: Tokens) -> tuple["Node | None", int]:
        """The child that agrees with `tokens` for longest, and for how many tokens.

        In sorted order that child is next to `tokens`: no other has to be looked at. Where both
        neighbours agree alike, the one that has all its pages, or a snapshot further on.
        """
        at = bisect_left(self.order, tokens)
        best: Node | None = None
        worth = (0, False, 0)
        for key in self.order[max(at - 1, 0) : at + 1]:
            child = self.children[key]
            overlap = common_length(key, tokens)
            snapshot = max([n for n in child.snapshots if n <= overlap], default=0)
            if overlap and (overlap, None not in child.pages, snapshot) > worth:
                best, worth = child, (overlap, None not in child.pages, snapshot)
        return best, worth[0]

    def covers(self, tokens: Tokens) -> bool:
        """Whether a child begins with `tokens`."""
        at = bisect_left(self.order, tokens)
        return at < len(self.order) and self.order[at][: len(tokens)] == tokens

    def shorter(self, tokens: Tokens) -> "list[Node]":
        """The partial children that `tokens` begins with."""
        found: list[Node] = []
        if not self.order:
            return found
        for length in range(len(tokens) - 1, 0, -1):
            child = self.children.get(tokens[:length])
            if child is not None:
                found.append(child)
        return found


class Snapshot:
    """The state of recurrent layers after `offset` tokens of a node; begin = end, as coverage."""

    __slots__ = ("holds", "node", "number", "offset", "tick")

    def __init__(self, node: Node, offset: int, number: int, tick: int) -> None:
        self.node = node
        self.offset = offset  # 1 to the node's tokens
        self.number = number  # in the state group; no other has it
        self.tick = tick  # when it was last in use
        self.holds = 0  # leases that go on from it


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page of tokens with what lies there, to be spilled or looked at.

    Attributes:
        alone: of the node, only this snapshot is meant.
    """

    node: Node
    alone: Snapshot | None = None

    @property
    def namespace(self) -> Hashable:
        """What the path was inserted under."""
        return self.node.namespace

    @property
    def page_number(self) -> int:
        """Position of its first token // page_size."""
        return self.node.number

    @property
    def tokens(self) -> Tokens:
        """The tokens of this page alone; fewer than page_size in a partial leaf."""
        return self.node.tokens

    @property
    def pages(self) -> tuple[int | None, ...]:
        """Page id of each group; None where a window recycled it."""
        return tuple(self.node.pages) if self.alone is None else (None,) * len(self.node.pages)

    @property
    def snapshots(self) -> list[Snapshot]:
        """States after some of its tokens."""
        return list(self.node.snapshots.values()) if self.alone is None else [self.alone]

    def token_ids(self) -> list[int]:
        """All tokens from position 0 to the end of this page. Costs the length of the path."""
        parts = [node.tokens for node in _path(self.node)]
        return [token for part in parts for token in part]

    def chain_keys(
        self, root_key: bytes, next_key: Callable[[bytes, Sequence[int]], bytes]
    ) -> tuple[bytes, bytes]:
        """(parent's key, own key), each key made of the key before it and the page's tokens.

        Remembered in the tree, so that the keys of a whole path cost its length once. `root_key`
        and `next_key` must be the same at every call.
        """
        missing = []
        node: Node | None = self.node
        while node is not None and node.parent is not None and node.digest is None:
            missing.append(node)
            node = node.parent
        for node in reversed(missing):
            node.digest = next_key(_digest(node.parent, root_key), node.tokens)
        return _digest(self.node.parent, root_key), _digest(self.node, root_key)


def common_length(a: Tokens, b: Tokens) -> int:
    """How many tokens two tuples share at their beginning."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _path(node: Node) -> list[Node]:
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _digest(node: Node | None, root_key: bytes) -> bytes:
    if node is None or node.parent is None:
        return root_key
    assert node.digest is not None
    return node.digest
