"""The simulated fleet: what is cached, what waits, and that affinity saves what it says."""

import random

import pytest

from tests.bench.replicas import (
    CACHE_TOKENS,
    MESSAGE,
    POLICIES,
    PREFILL_RATE,
    SYSTEM,
    Fleet,
    Talk,
    simulate,
)


def test_a_prompt_waits_for_those_before_it_and_computes_what_is_not_cached() -> None:
    fleet = Fleet(1, random.Random(0))
    first, cached = fleet.answer(0, Talk(0, app=0, turns=1), now=0.0)
    assert (first, cached) == (pytest.approx((SYSTEM + MESSAGE) / PREFILL_RATE), 0)
    second, cached = fleet.answer(0, Talk(1, app=0, turns=1), now=0.0)
    assert cached == SYSTEM
    assert second > first


def test_no_replica_keeps_more_than_it_can() -> None:
    fleet = Fleet(1, random.Random(0))
    for number in range(500):
        fleet.answer(0, Talk(number, number % 3, 1, tokens=SYSTEM + 4000), now=float(number))
        shared = sum(v if kind == "app" else v - SYSTEM for (kind, _), v in fleet.kept[0].items())
        assert fleet.held[0] == shared <= CACHE_TOKENS


@pytest.mark.parametrize("seed", [1, 2])
def test_affinity_reuses_more_and_waits_less(seed: int) -> None:
    found = {policy: simulate(policy, 10, 1.5, seed) for policy in POLICIES}
    assert found["affinity"].cached > 0.75 > 0.6 > found["least load"].cached
    assert found["earliest"].p95_s < found["least load"].p95_s / 2
    assert found["earliest"].p95_s <= found["round robin"].p95_s
