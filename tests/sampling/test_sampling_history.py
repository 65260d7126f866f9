from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.sampling.adjustments import TokenHistory

SPARE = 300


def as_dicts(history: TokenHistory, slots: np.ndarray) -> list[dict[int, float]]:
    ids, counts = history.ids(slots), history.counts(slots)
    assert (counts[ids == SPARE] == 0).all()
    found = [
        [(int(token), float(times)) for token, times in zip(*row, strict=True) if token != SPARE]
        for row in zip(ids, counts, strict=True)
    ]
    assert all(len(dict(pairs)) == len(pairs) for pairs in found)  # each token once
    return [dict(pairs) for pairs in found]


@given(
    before=st.lists(st.integers(0, 200), max_size=90),
    output=st.lists(st.integers(0, 200), max_size=150),
)
def test_counts_each_token_of_each_slot(before: list[int], output: list[int]):
    history = TokenHistory(SPARE)
    history.start(3, before, counted=True)
    history.start(1, [], counted=True)
    slots = np.array([3, 1])
    for token in output:
        # slots 0, 2 and 9 have no history, and -1 is no slot
        history.observe(np.array([3, 2, 9, 1, -1, 0]), np.array([token, 7, 7, 200 - token, 7, 7]))
    expected = [Counter(before + output), Counter(200 - token for token in output)]
    assert as_dicts(history, slots) == [dict(counter) for counter in expected]


@given(
    before=st.lists(st.integers(0, SPARE - 1), max_size=90),
    output=st.lists(st.integers(0, SPARE - 1), max_size=150),
)
def test_a_slot_that_is_not_counted_has_the_same_tokens(before: list[int], output: list[int]):
    history, slots = TokenHistory(SPARE), np.array([0, 1])
    for slot in slots:
        history.start(slot, before, counted=bool(slot))
    for token in output:
        history.observe(slots, np.array([token, token]))
    ids = history.ids(slots)
    np.testing.assert_array_equal(ids[0], ids[1])
    assert set(ids[0].tolist()) - {SPARE} == {*before, *output}
    assert not history.counts(slots)[0].any()


def test_ids_are_as_wide_as_the_longest_of_the_histories_asked_for():
    history = TokenHistory(SPARE)
    history.start(0, range(5), counted=True)
    history.start(1, [9], counted=True)
    history.observe(np.array([1]), np.array([8]))
    assert history.ids(np.array([1, 0])).tolist() == [[9, 8, SPARE, SPARE, SPARE], [0, 1, 2, 3, 4]]
    assert history.ids(np.array([1])).tolist() == [[9, 8]]
    history.stop(0)
    history.observe(np.array([0]), np.array([1]))
    history.stop(1)
    history.start(0, [], counted=True)
    assert as_dicts(history, np.array([0])) == [{}]


def test_histories_may_begin_and_end_while_the_batch_is_the_same():
    history, slots = TokenHistory(SPARE), np.array([0, 1])
    history.start(0, [], counted=True)
    history.observe(slots, np.array([5, 6]))
    history.start(1, [], counted=True)
    history.observe(slots, np.array([7, 8]))
    assert as_dicts(history, slots) == [{5: 1, 7: 1}, {8: 1}]
    history.stop(0)
    history.observe(slots, np.array([9, 9]))
    history.start(0, [], counted=False)
    assert as_dicts(history, slots) == [{}, {8: 1, 9: 1}]


def test_a_slot_used_again_starts_empty():
    history = TokenHistory(SPARE)
    history.start(0, [4, 4, 5], counted=True)
    history.start(0, [7], counted=True)
    history.start(1, [], counted=True)
    assert as_dicts(history, np.array([0, 1])) == [{7: 1.0}, {}]
