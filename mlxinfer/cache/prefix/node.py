"""Pages of tokens in a prefix tree, and how much of a prompt they hold. Changes nothing but a node.

Each group lowers a position to the last one up to it where it can resume (`last_resumable` in
pages.py, whoever has the pages), and so does a span; `resume_point` asks them in turn until all
agree.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ..pages import PageTable

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
        """Raise the priority to that of a sequence that uses the page."""
        self.priority = max(self.priority, priority)

    def held(self, group: int, tokens: int) -> int:
        """`tokens` where it has the page of a group, else 0."""
        return tokens if self.pages[group] is not None else 0

    def last_snapshot(self, tokens: int) -> int:
        """The most of its first `tokens` that a snapshot is after; 0: none is."""
        return max([offset for offset in self.snapshots if offset <= tokens], default=0)

    @property
    def evictable(self) -> bool:
        """Whether the node may be evicted now."""
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

        Children are sorted, so that child is next to the place of `tokens`: only two children are
        compared. If both agree equally far, the one counts that has all its pages or a snapshot
        further on.
        """
        at = bisect_left(self.order, tokens)
        best: Node | None = None
        worth = (0, False, 0)
        for key in self.order[max(at - 1, 0) : at + 1]:
            child = self.children[key]
            overlap = common_length(key, tokens)
            snapshot = child.last_snapshot(overlap)
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

    def token_ids(self) -> list[int]:
        """All tokens from position 0 to the end of this page. Costs the length of the path."""
        parts, node = [], self
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    def chain_keys(
        self, root_key: bytes, next_key: Callable[[bytes, Sequence[int]], bytes]
    ) -> tuple[bytes, bytes]:
        """(parent's key, own key), each key made of the key before it and the page's tokens.

        Remembered in the tree, so that the keys of a whole path cost its length once. `root_key`
        and `next_key` must be the same at every call.
        """
        assert self.parent is not None
        missing: list[Node] = []
        node = self
        while node.parent is not None and node.digest is None:
            missing.append(node)
            node = node.parent
        key = _digest(node, root_key)
        for node in reversed(missing):
            key = node.digest = next_key(key, node.tokens)
        return _digest(self.parent, root_key), key


class Snapshot:
    """The state of recurrent layers after `offset` tokens of a node: it covers that position."""

    __slots__ = ("holds", "node", "number", "offset", "tick")

    def __init__(self, node: Node, offset: int, number: int, tick: int) -> None:
        self.node = node
        self.offset = offset  # 1 to the node's tokens
        self.number = number  # in the state group; no other has it
        self.tick = tick  # when it was last in use
        self.holds = 0  # leases that go on from it


def common_length(a: Tokens, b: Tokens) -> int:
    """How many tokens two tuples share at their beginning."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _digest(node: Node, root_key: bytes) -> bytes:
    if node.parent is None:
        return root_key
    assert node.digest is not None
    return node.digest


Rule = Callable[[int], int]  # position -> the last one up to it where a group can resume
Spans = Sequence[tuple[int, int]]  # [from, to) positions that are reused as a whole or not at all


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The prefix that a prompt can reuse. Lock it before anything else changes the tree."""

    namespace: Hashable
    num_tokens: int  # positions that need not be computed
    num_matched: int  # positions that agree with the tree, whether groups can resume there or not
    nodes: list[Node]  # the whole pages before `num_tokens`, in order
    path: list[Node]  # the whole pages before `num_matched`
    cut: Node | None  # the page that num_tokens lies inside of
    cut_tokens: int  # how many of its tokens: num_tokens % page_size
    snapshot: Snapshot | None  # of the state after `num_tokens`, where there are state layers
    first: list[int]  # by group: number of the first page after the kept ones needed to go on
    num_kept: list[int]  # by group: pages at the front that are needed besides
    page_size: int
    spans: Spans  # of the prompt

    @property
    def cut_pages(self) -> tuple[int | None, ...]:
        """By group: the page id to copy the first `cut_tokens` tokens from; () without a cut."""
        return tuple(self.cut.pages) if self.cut else ()

    def tables(self) -> list[PageTable]:
        """By group: a page table of the whole pages that are needed to go on."""
        return [
            PageTable(
                self.page_size,
                num_kept=num_kept,
                first=first,
                kept=[_held(node, group) for node in self.nodes[:num_kept]],
                pages=[_held(node, group) for node in self.nodes[first:]],
            )
            for group, (first, num_kept) in enumerate(zip(self.first, self.num_kept, strict=True))
        ]


def resume_point(longest: int, rules: Sequence[Rule], alignment: int = 1) -> int:
    """The last position up to `longest` that all groups accept, a multiple of `alignment`."""
    point, checked = longest - longest % alignment, -1
    while point != checked:
        checked = point
        for lower in rules:
            point = lower(point)
            point -= point % alignment
    return point


def span_rule(start: int, stop: int) -> Rule:
    """All positions except those inside of a span: its tokens are reused together or not at all."""
    return lambda point: start if start < point < stop else point


def _held(node: Node, group: int) -> int:
    page = node.pages[group]
    assert page is not None, "a restore point has every page that it needs"
    return page
