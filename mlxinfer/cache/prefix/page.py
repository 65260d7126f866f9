"""A named page, and where the groups of layers have it. Pure Python."""

import heapq
from typing import Generic, TypeVar

from .names import Name

Item = TypeVar("Item")


class Page:
    """Consecutive tokens under the name of the page before them. The last of a sequence may be
    short.

    Attributes:
        parent: the name of the page before it.
        number: position // page size.
        ids: by group: the page of the group's pool, or the number of the state after its last
            token; None: the group has none.
        users: by group: how many sequences need it.
        anchored: by group: whether a sequence went on from there; of a window, which is passed by
            elsewhere.
        priority: the highest of the sequences that used it.
        tick: when it was last in use.
        is_named: no longer, once everything was forgotten; then it goes with its last user.
    """

    __slots__ = (
        "anchored",
        "ids",
        "is_named",
        "name",
        "number",
        "parent",
        "priority",
        "tick",
        "tokens",
        "users",
    )

    def __init__(
        self, name: Name, parent: Name, number: int, tokens: tuple[int, ...], anchored: list[bool]
    ) -> None:
        self.name, self.parent, self.number, self.tokens = name, parent, number, tokens
        self.ids: list[int | None] = [None] * len(anchored)
        self.users = [0] * len(anchored)
        self.anchored = anchored
        self.priority = self.tick = 0
        self.is_named = True

    def held(self, groups: range) -> int:
        """How many of some groups have it."""
        return sum(self.ids[group] is not None for group in groups)

    @property
    def unused(self) -> list[int]:
        """The groups that have it, and in which no sequence needs it."""
        return [g for g, i in enumerate(self.ids) if i is not None and not self.users[g]]


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
