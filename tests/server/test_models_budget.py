"""How memory is divided, in sums that people can do themselves; pauses after loads that failed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.models import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    MIN_KV_BYTES,
    ModelSlot,
    RegistryEntry,
    kv_budgets,
)

GB = 10**9


def need(name: str, weights: int, kv_bytes: int | None = None, pinned: bool = False) -> ModelSlot:
    def load(num_bytes: int) -> Any:
        raise AssertionError

    return ModelSlot(
        RegistryEntry(name=name, load=load, kv_bytes=kv_bytes, pinned=pinned), 0, weights
    )


def test_one_model_gets_what_its_weights_leave() -> None:
    assert kv_budgets([need("a", 8 * GB)], 20 * GB) == {"a": 12 * GB}


def test_models_that_fit_together_share_the_rest() -> None:
    needs = [need("a", 4 * GB), need("b", 6 * GB), need("c", 2 * GB, kv_bytes=2 * GB)]
    assert kv_budgets(needs, 20 * GB) == {"a": 3 * GB, "b": 3 * GB, "c": 2 * GB}


def test_models_that_take_turns_get_a_share_of_what_the_largest_leaves() -> None:
    needs = [need("a", 10 * GB), need("b", 5 * GB), need("c", 12 * GB)]
    assert set(kv_budgets(needs, 22 * GB).values()) == {4 * GB}


def test_many_models_with_tiny_shares_take_turns() -> None:
    needs = [need(f"m{i}", GB) for i in range(19)]
    assert set(kv_budgets(needs, 20 * GB).values()) == {int(0.4 * 19 * GB)}


def test_pinned_models_count_beside_each() -> None:
    needs = [need("a", 10 * GB, pinned=True), need("b", 5 * GB), need("c", 6 * GB)]
    assert set(kv_budgets(needs, 20 * GB).values()) == {int(0.4 * 2 * GB)}


@pytest.mark.parametrize(
    "needs",
    [
        [need("x", 20 * GB)],
        [need("x", 5 * GB, kv_bytes=6 * GB)],
        [need("x", 5 * GB), need("y", 6 * GB, pinned=True)],
        [need("x", 10 * GB - 10**6)],
    ],
)
def test_a_model_that_can_never_fit_is_named(needs: list[ModelSlot]) -> None:
    with pytest.raises(InvalidRequestError, match="model x does not fit"):
        kv_budgets(needs, 10 * GB)


sizes = st.integers(0, 100).map(lambda n: n * MIN_KV_BYTES)
some = st.lists(st.tuples(sizes, st.none() | sizes, st.booleans()), min_size=1, max_size=5)


@given(some=some, limit=sizes)
def test_budgets_together_stay_within_the_limit(
    some: list[tuple[int, int | None, bool]], limit: int
) -> None:
    needs = [need(f"m{i}", *each) for i, each in enumerate(some)]
    try:
        budgets = kv_budgets(needs, limit)
    except InvalidRequestError:
        return
    for each in needs:
        at_once = [n for n in needs if n.pinned or n is each]
        assert sum(n.weights_bytes + budgets[n.entry.name] for n in at_once) <= limit
        assert each.entry.kv_bytes in (None, budgets[each.entry.name])
    if sum(n.weights_bytes + (n.entry.kv_bytes or 0) for n in needs) > limit:
        return
    free = [budgets[n.entry.name] for n in needs if n.entry.kv_bytes is None]
    assert len(set(free)) <= 1
    assert all(share >= MIN_KV_BYTES for share in free)


def test_a_model_that_did_not_fail_has_no_pause() -> None:
    assert need("a", GB).retry_left_s == 0.0


def test_pauses_double_up_to_the_longest() -> None:
    slot = need("a", GB)
    pauses = [slot.fail() for _ in range(100)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S


@given(st.lists(st.floats(0, 1000)))
def test_a_pause_ends_after_its_announced_length(later: list[float]) -> None:
    slot, now = need("a", GB), [0.0]
    slot.clock = lambda: now[0]
    for in_a_row, later_s in enumerate(later, start=1):
        now[0] += later_s
        pause_s = slot.fail()
        assert slot.failures_in_a_row == in_a_row
        before_s = now[0]
        now[0] = before_s + pause_s / 2
        assert 0 < slot.retry_left_s <= MAX_PAUSE_S
        now[0] = before_s + pause_s
        assert slot.retry_left_s == 0.0
