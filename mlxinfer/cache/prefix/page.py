"""A named page, and where the groups of layers have it. Pure Python."""

import heapq
from collections import Counter
from typing import Generic, TypeVar

from ...fair import NOBODY, Tenant
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
        owner: the tenant that computed the first page of its prefix.
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
        "owner",
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
        self.owner = NOBODY
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


class UnusedPages:
    """The pages of a group that may be evicted, those of each tenant in a queue of its own.

    The tenant that holds most for its weight loses pages first, so a flood of one evicts no prefix
    of another that holds less than its share. Within a tenant the page of least worth goes first.

    Attributes:
        held: named pages of the group by tenant, used or not.
    """

    def __init__(self) -> None:
        self.held: Counter[Tenant] = Counter()
        self._queues: dict[Tenant, EvictionQueue[Page]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def items(self) -> set[Page]:
        return {page for queue in self._queues.values() for page in queue.items()}

    def push(self, page: Page, worth: tuple[int, ...]) -> None:
        """See `EvictionQueue.push`."""
        if page.owner not in self._queues:
            self._queues[page.owner] = EvictionQueue()
        self._queues[page.owner].push(page, worth)

    def discard(self, page: Page) -> None:
        """See `EvictionQueue.discard`."""
        if page.owner in self._queues:
            self._queues[page.owner].discard(page)

    def pop(self, tenant: Tenant, num_pages: int, *, everything: bool) -> Page | None:
        """The page to evict next for a tenant; None: there is none, see `num_for`.

        Args:
            tenant: needs room.
            num_pages: of the group, which tenants share.
            everything: also from others that hold less than their share, if nobody else has any.
        """
        counts = self._evictable(tenant, num_pages)
        if not counts and everything:
            counts = {owner: len(queue) for owner, queue in self._queues.items() if len(queue)}
        if not counts:
            return None
        most = max(counts, key=lambda owner: self.held[owner] / owner.weight)
        return self._queues[most].pop()

    def num_for(self, tenant: Tenant, num_pages: int) -> int:
        """Pages that may be evicted for a tenant while others keep their shares of `num_pages`."""
        return sum(self._evictable(tenant, num_pages).values())

    def _evictable(self, tenant: Tenant, num_pages: int) -> dict[Tenant, int]:
        """The same by owner; those with none are left out."""
        counts, weight = {}, sum(owner.weight for owner in self.held.keys() | {tenant})
        for owner, queue in self._queues.items():
            count = len(queue)
            if owner != tenant:
                count = min(count, self.held[owner] - int(num_pages * owner.weight / weight))
            if count > 0:
                counts[owner] = count
        return counts

    def hold(self, owner: Tenant, count: int) -> None:
        """Count pages that a tenant has got, or lost."""
        self.held[owner] += count
        if not self.held[owner]:
            del self.held[owner]
