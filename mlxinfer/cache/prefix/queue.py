"""What may be evicted, least worth keeping first. Knows an order, neither tokens nor pages."""

import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EvictionQueue(Generic[Item]):
    """A priority queue of distinct items that can be taken out: a heap whose stale entries are
    skipped, and swept out when they are the most. All operations O(log n), amortised.
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
        """Put an item in, or give it another worth; of equals the first one in is the first out."""
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
        """Take out what is least worth keeping; None: empty."""
        while self._heap:
            _, serial, item = heapq.heappop(self._heap)
            if self._entry.get(item) == serial:
                del self._entry[item]
                return item
        return None
