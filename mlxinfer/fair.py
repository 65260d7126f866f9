"""Fair shares where something is scarce: whose turn it is, and who gives up a place. Plain Python.

A tenant is whoever a share belongs to, such as the key of a server. Two rules hold at each place
that waits:

- *Turns.* The tenant that has got the least work for its weight comes next: start-time fair
  queueing (Goyal, Vin and Cheng, 1996), in tokens as in VTC (arXiv:2401.00588). Who did not want
  anything for a while has earned nothing by that, and owes nothing for what nobody else wanted.
- *Places.* Where all places are taken, the tenant that has the most for its weight gives one up, if
  it then still has as many as the one that takes it. Tenants with as many take turns.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

BACKGROUND = 1 / 8  # of a tenant's weight, for its requests in the background


class Tenant(NamedTuple):
    """Whose share it is.

    Attributes:
        name: "" where all requests have one share.
        weight: a tenant of weight 2 gets twice as much as one of weight 1, if both want all.
        background: whether it is the part of a tenant that waits for nobody.
    """

    name: str = ""
    weight: float = 1.0
    background: bool = False

    def at(self, priority: int) -> "Tenant":
        """The tenant of a request with a priority; above 0 it is one in the background.

        Its requests in the background are a tenant of little weight. So they stay behind all
        others, and still get a share: nothing starves.
        """
        if priority <= 0 or self.background:
            return self
        return Tenant(self.name, self.weight * BACKGROUND, background=True)


NOBODY = Tenant()


class Shares:
    """The work that tenants have got where they share something.

    Args:
        slice: of work for a weight of 1. Tenants that have equally many places change places when
            one is ahead of the other by a slice; inf: they do not.
    """

    def __init__(self, slice: float = math.inf) -> None:
        self.slice = slice
        self._now = 0.0  # the least work for its weight of those that wanted the last turn
        self._used: dict[Tenant, float] = {}  # the same of those that have got more

    def used(self, tenant: Tenant) -> float:
        """Work for its weight that counts for a tenant."""
        return max(self._used.get(tenant, 0.0), self._now)

    def order(self, tenants: Iterable[Tenant]) -> list[Tenant]:
        """Tenants that want a turn, whose turn it is first; of equal ones in the given order."""
        return sorted(tenants, key=self.used)

    def advance(self, wanting: Iterable[Tenant]) -> None:
        """Begin a turn of one of those that want it: who wants none earns nothing by that."""
        self._now = min(map(self.used, wanting), default=self._now)
        self._used = {other: used for other, used in self._used.items() if used > self._now}

    def charge(self, tenant: Tenant, work: float) -> None:
        self._used[tenant] = self.used(tenant) + work / tenant.weight

    def giver(self, held: Mapping[Tenant, int], taker: Tenant, more: int = 1) -> Tenant | None:
        """Who gives a place to `taker`; None: nobody.

        A tenant without a place takes one from a tenant with several, whatever its weight, unless
        it is ahead by a slice. A tenant keeps its last place until it is ahead by a slice.
        """
        mine, used = held.get(taker, 0), self.used(taker)
        giver, most = None, 0.0
        for tenant, count in held.items():
            ahead, per_weight = self.used(tenant) - used, count / tenant.weight
            if tenant == taker:
                continue
            has_none = not mine and ahead > -self.slice
            has_more = count > 1 and (has_none or per_weight > (mine + more) / taker.weight)
            had_its_turn = ahead >= self.slice and per_weight > mine / taker.weight
            if (has_more or had_its_turn) and per_weight > most:
                giver, most = tenant, per_weight
        return giver


class FairQueue(Generic[T]):
    """A queue with a share of its places and turns for each tenant.

    Args:
        max_waiting: items, of all tenants together.

    Attributes:
        shares: of turns. Who has done the work of an item charges it.
    """

    def __init__(self, max_waiting: int) -> None:
        self.shares = Shares()
        self._max_waiting = max_waiting
        self._waiting: dict[Tenant, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: Tenant, item: T) -> T | None:
        """Add an item, behind the others of its tenant.

        Returns:
            The item that has no place, where all places were taken: the last one of a tenant with
            more places, or this one.
        """
        lost = None
        if len(self) >= self._max_waiting:
            giver = self.shares.giver({t: len(q) for t, q in self._waiting.items()}, tenant)
            if giver is None:
                return item
            lost = self._waiting[giver].pop()
        self._waiting.setdefault(tenant, deque()).append(item)
        return lost

    def take(self, may: Callable[[Tenant], bool] = lambda _: True) -> tuple[Tenant, T] | None:
        """Take the first item of the tenant whose turn it is; None: nothing waits.

        Args:
            may: whether a tenant may have a turn now.
        """
        able = [tenant for tenant in self._waiting if may(tenant)]
        if not able:
            return None
        self.shares.advance(self._waiting)
        tenant = min(able, key=self.shares.used)
        items = self._waiting[tenant]
        item = items.popleft()
        if not items:
            del self._waiting[tenant]
        return tenant, item

    def remove(self, tenant: Tenant, item: T) -> None:
        """Take out an item that gave up, if it still waits."""
        items = self._waiting.get(tenant, deque())
        if item in items:
            items.remove(item)
        if not items:
            self._waiting.pop(tenant, None)
