"""Shares of turns and places, over random programs of tenants, weights and jobs."""

import random
from collections import Counter
from itertools import combinations

import pytest

from mlxinfer.fair import FairQueue, Shares, Tenant

SEEDS = range(60)


def tenants_of(rnd: random.Random) -> list[Tenant]:
    return [Tenant(str(i), rnd.choice([0.25, 0.5, 1, 1, 2, 5])) for i in range(rnd.randint(2, 6))]


@pytest.mark.alike
@pytest.mark.parametrize("seed", SEEDS)
def test_turns_are_within_a_job_of_the_ideal(seed: int) -> None:
    """The bound of start-time fair queueing holds in each time in which two tenants both wait."""
    rnd = random.Random(seed)
    tenants = tenants_of(rnd)
    queue = FairQueue[int](10**6)
    waiting: Counter[Tenant] = Counter()
    got = dict.fromkeys(tenants, 0.0)  # for its weight
    longest = {tenant: rnd.randint(1, 50) for tenant in tenants}
    began: dict[tuple[Tenant, Tenant], float] = {}  # what one was ahead when both began to wait
    for _ in range(3000):
        if rnd.random() < 0.7:
            tenant = rnd.choice(tenants)
            for _ in range(rnd.choice([1, 1, 30])):
                assert queue.put(tenant, rnd.randint(1, longest[tenant])) is None
                waiting[tenant] += 1
        taken = queue.take()
        assert (taken is None) == (not waiting.total()), f"work is conserved (seed {seed})"
        if taken is None:
            continue
        tenant, job = taken
        queue.shares.charge(tenant, job)
        waiting[tenant] -= 1
        for pair in combinations(tenants, 2):
            if not all(waiting[t] + (t == tenant) for t in pair):
                began.pop(pair, None)
                continue
            began.setdefault(pair, got[pair[0]] - got[pair[1]])
        got[tenant] += job / tenant.weight
        for pair, ahead in began.items():
            bound = sum(longest[t] / t.weight for t in pair)
            assert abs(got[pair[0]] - got[pair[1]] - ahead) <= bound + 1e-6, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenant_with_its_part_of_the_places_loses_none(seed: int) -> None:
    """Who comes with nothing is let in while another has two, and no place is left empty."""
    rnd = random.Random(seed)
    tenants, places = tenants_of(rnd), rnd.randint(1, 12)
    queue = FairQueue[tuple[Tenant, int]](places)
    held: Counter[Tenant] = Counter()
    for number in range(500):
        if rnd.random() < 0.3:
            taken = queue.take()
            if taken is not None:
                held[taken[0]] -= 1
            continue
        tenant = rnd.choice([tenants[0], *tenants])
        before, lost = Counter(held), queue.put(tenant, (tenant, number))
        held[tenant] += 1
        if lost is not None:
            held[lost[0]] -= 1
        assert len(queue) == held.total() == min(before.total() + 1, places)
        richer = [t for t in tenants if t != tenant and before[t] > 1]
        if lost == (tenant, number):  # refused: nobody who has several has more for its weight
            assert before[tenant] or not richer, f"seed {seed}"
            mine = (before[tenant] + 1) / tenant.weight
            assert all(before[t] / t.weight <= mine for t in richer), f"seed {seed}"
        elif lost is not None:
            assert lost[0] in richer, f"seed {seed}"
            assert all(before[t] / t.weight <= before[lost[0]] / lost[0].weight for t in richer)


def test_requests_in_the_background_have_little_weight() -> None:
    tenant = Tenant("one", 4.0)
    assert tenant.at(0) == tenant.at(-5) == tenant
    behind = tenant.at(1)
    assert behind == tenant.at(7) == behind.at(1)
    assert (behind.name, behind.weight, behind != tenant) == ("one", 0.5, True)


def test_a_tenant_that_comes_back_has_earned_nothing_and_owes_nothing() -> None:
    shares, one, other = Shares(), Tenant("one"), Tenant("other")
    for _ in range(100):  # alone
        shares.advance([one])
        shares.charge(one, 10)
    order = []
    for _ in range(10):
        shares.advance([one, other])
        first = shares.order([one, other])[0]
        shares.charge(first, 10)
        order.append(first)
    assert Counter(order) == {one: 5, other: 5}


def test_who_has_as_many_places_takes_one_after_a_slice() -> None:
    shares, one, other = Shares(100), Tenant("one"), Tenant("other")
    shares.charge(one, 99)
    assert shares.giver({one: 1}, other) is None
    shares.charge(one, 1)
    assert shares.giver({one: 1}, other) == one
    assert shares.giver({one: 1, other: 1}, other) is None
    assert shares.giver({one: 2}, Tenant("third")) == one


def test_nobody_loses_a_place_to_who_has_had_more() -> None:
    """Otherwise a tenant of little weight would take its place again at once."""
    shares, light, heavy = Shares(100), Tenant("light", 0.01), Tenant("heavy")
    shares.charge(light, 10)
    assert shares.giver({light: 1, heavy: 7}, heavy) == light
    assert shares.giver({heavy: 8}, light) is None


def test_the_counts_of_tenants_that_have_left_are_forgotten() -> None:
    queue = FairQueue[int](10)
    for number in range(1000):
        tenant = Tenant(str(number))
        queue.put(tenant, 1)
        queue.take()
        queue.shares.charge(tenant, 5)
        queue.put(Tenant("always"), 1)
        queue.take()
        queue.shares.charge(Tenant("always"), 5)
    assert len(queue.shares._used) < 5


def test_an_item_that_gave_up_is_gone() -> None:
    queue, tenant = FairQueue[str](10), Tenant("one")
    queue.put(tenant, "first")
    queue.put(tenant, "second")
    queue.remove(tenant, "first")
    queue.remove(tenant, "first")
    assert queue.take() == (tenant, "second")
    assert queue.take() is None
    assert not len(queue)
