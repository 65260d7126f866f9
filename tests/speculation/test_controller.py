"""The controller on simulated machines (`machines.py`): figures of sources, nothing measured."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from speculation.machines import (
    DEPTH,
    MACHINES,
    Machine,
    best_fixed,
    controlled,
    simulate,
    straight,
)

from mlxinfer.speculation.controller import (
    FIRST_REST,
    LOOK_BACK,
    Controller,
    FixedDepth,
    MeasuredStep,
    Outlook,
    VerifyTimes,
    bucket_of,
    relative_cost,
)

TOKENS = 1000
LOSING = [machine for machine in MACHINES if not machine.gains]
GAINING = [machine for machine in MACHINES if machine.gains]


def names(machine: Machine) -> str:
    return machine.name


@pytest.mark.parametrize("machine", MACHINES, ids=names)
def test_the_simulated_machine_gains_or_loses_as_its_source_says(machine: Machine) -> None:
    plain = simulate(machine, FixedDepth(0), num_tokens=TOKENS).rate
    best, rate = best_fixed(machine, num_tokens=TOKENS)
    assert (best > 0 and rate > 1.15 * plain) if machine.gains else best == 0


@pytest.mark.parametrize("machine", LOSING, ids=names)
def test_where_speculation_loses_nothing_is_proposed(machine: Machine) -> None:
    plain = simulate(machine, FixedDepth(0), num_tokens=TOKENS).rate
    run = controlled(machine, num_tokens=TOKENS)
    assert run.speculative_steps <= 0.02 * run.steps
    assert run.rate >= 0.97 * plain


@pytest.mark.alike
@pytest.mark.parametrize("machine", GAINING, ids=names)
def test_elsewhere_nine_tenths_of_the_best_fixed_depth(machine: Machine) -> None:
    for acceptance in (machine.acceptance - 0.15, 0.9):
        given = replace(machine, acceptance=acceptance)
        _, best = best_fixed(given, num_tokens=TOKENS)
        assert controlled(given, num_tokens=TOKENS).rate >= 0.9 * best, acceptance


@pytest.mark.alike
@pytest.mark.parametrize("num_sequences", [pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("machine", MACHINES, ids=names)
def test_many_get_nine_tenths_of_the_best_fixed_depth(machine: Machine, num_sequences: int) -> None:
    how = {"num_tokens": TOKENS * num_sequences // 2, "num_sequences": num_sequences}
    _, best = best_fixed(machine, **how)
    assert controlled(machine, **how).rate >= 0.9 * best


@pytest.mark.parametrize("machine", GAINING, ids=names)
def test_text_that_turns_out_of_reach_ends_proposals_within_sixteen_steps(machine: Machine) -> None:
    policy = Controller(max_depth=DEPTH)
    before = simulate(machine, policy, num_tokens=100, acceptance=lambda _: 0.9)
    assert before.speculative_steps
    run = simulate(machine, policy, num_tokens=80, acceptance=lambda _: 0.0, seed=1)
    assert run.speculative_steps <= LOOK_BACK


@pytest.mark.parametrize("machine", MACHINES, ids=names)
def test_an_adversarial_text_of_200_tokens_costs_three_per_cent_at_most(machine: Machine) -> None:
    plain = simulate(machine, FixedDepth(0), num_tokens=200).rate
    given = replace(machine, acceptance=0.0)
    assert controlled(given, num_tokens=200).rate >= 0.97 * plain


def test_a_load_that_goes_away_is_not_taken_for_a_gain() -> None:
    """Plain steps were measured while the machine was busy, and those with proposals after."""
    machine = Machine("busy", 0.02, straight(0.05), 0.02, 0.0, True)

    def busy(step: int) -> float:
        return 2.0 if step < 5 else 1.0

    plain = simulate(machine, FixedDepth(0), num_tokens=400, load=busy)
    run = simulate(machine, Controller(max_depth=DEPTH), num_tokens=400, load=busy)
    assert run.rate >= 0.97 * plain.rate


def test_text_that_comes_within_reach_is_found_again() -> None:
    machine = GAINING[0]
    policy = Controller(max_depth=DEPTH)
    simulate(machine, policy, num_tokens=300, acceptance=lambda _: 0.0)
    run = simulate(machine, policy, num_tokens=4 * FIRST_REST, acceptance=lambda _: 0.95)
    assert run.speculative_steps > 10


def test_a_machine_that_becomes_slow_with_many_rows_is_noticed() -> None:
    """The same acceptance; the step times change, as when a GPU throttles."""
    policy = Controller(max_depth=DEPTH)
    fast = Machine("fast", 0.02, straight(0.05), 0.05, 0.8, True)
    slow = replace(fast, cost=straight(1.0))
    assert simulate(fast, policy, num_tokens=500).speculative_steps > 50
    simulate(slow, policy, num_tokens=300)
    later = simulate(slow, policy, num_tokens=300)
    assert later.speculative_steps <= 0.1 * later.steps


@given(
    chances=st.lists(st.lists(st.floats(0, 0.99), max_size=DEPTH), min_size=1, max_size=6),
    slope=st.floats(0.0, 1.2),
    cost=st.floats(0, 0.4),
)
def test_no_depth_promises_more(chances: list[list[float]], slope: float, cost: float) -> None:
    """By brute force over random depths, on a machine with all times measured."""
    policy = Controller(max_depth=DEPTH)
    n = len(chances)
    for extra in range(8 * n):
        for _ in range(4 if extra == 0 else 2):
            seconds = straight(slope)(n + extra)
            policy.observe(MeasuredStep(n, extra, 10**6, seconds, extra and 1e-9, 0))
    outlooks = [Outlook(some, cost) for some in chances]

    def rate(depths: list[int]) -> float:
        tokens = float(n)
        for some, depth in zip(chances, depths, strict=True):
            gain = 1.0
            for chance in some[:depth]:
                gain *= chance
                tokens += gain
        times = policy.times
        took = times.seconds(n, sum(depths)) + max(depths) * cost * times.seconds(n, 0)
        return tokens / took

    chosen = policy.choose(outlooks, n)
    assert all(depth <= len(some) for depth, some in zip(chosen, chances, strict=True))
    rng = random.Random(0)
    for _ in range(60):
        other = [rng.randint(0, len(some)) for some in chances]
        if sum(other):
            assert rate(chosen) >= rate(other) / 1.03 - 1e-9


def test_unlike_sequences_get_unlike_depths() -> None:
    policy = Controller(max_depth=DEPTH)
    for extra in (0, 0, 0, 0, *range(1, 15)):
        policy.observe(MeasuredStep(2, extra, 10**6, 0.01 * (1 + 0.08 * extra)))
    likely, unlikely = Outlook([0.95] * 7), Outlook([0.1] * 7)
    depths = policy.choose([likely, unlikely], 2)
    assert depths[0] >= 4
    assert depths[1] == 0


def test_the_prior_is_the_published_curve() -> None:
    times = VerifyTimes()
    assert [round(times.seconds(1, extra), 2) for extra in range(8)] == [
        *(1.0, 0.98, 1.07, 1.26, 1.47, 1.69, 1.89, 2.11)
    ]
    assert relative_cost(16) > relative_cost(8)
    times.add(1, 0, 0.02)
    times.add(1, 0, 0.02)
    assert times.seconds(1, 7) == pytest.approx(0.02 * 2.11)


def test_one_slow_step_changes_no_measured_time() -> None:
    times = VerifyTimes()
    for seconds in (0.01, 0.01, 5.0, 0.01, 0.01):
        times.add(1, 3, seconds)
    assert times.seconds(1, 3) == 0.01


@pytest.mark.ci
def test_batch_sizes_are_measured_in_buckets_that_widen() -> None:
    buckets = [bucket_of(n) for n in range(1, 65)]
    assert buckets[:8] == [1, 2, 3, 4, 6, 6, 8, 8]
    assert buckets == sorted(buckets)
    assert all(n <= bucket <= 1.5 * n for n, bucket in enumerate(buckets, start=1))
