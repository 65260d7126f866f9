from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.sampling.history import IN_PROMPT, TokenHistory

VOCAB = 300


def came(history: TokenHistory, slots: list[int], counts: list[int], newest: list[int]) -> list:
    """By slot: token -> how often, as the device has it."""
    rows = history.rows(slots)
    device_rows = mx.array(rows.astype(np.int32))
    table = history.came(rows, device_rows, np.array(counts), mx.array(newest, mx.int32))
    found = np.array(table)
    assert found.dtype == np.int32
    assert not found[:, VOCAB + 1 :].any()
    return [{int(t): int(row[t]) for t in np.flatnonzero(row[:VOCAB])} for row in found]


tokens = st.integers(0, VOCAB - 1)


@given(
    prompt=st.lists(tokens, max_size=9),
    before=st.lists(tokens, max_size=9),
    output=st.lists(tokens, max_size=20),
    evaluated=st.booleans(),
)
def test_counts_each_token_of_each_slot(
    prompt: list[int], before: list[int], output: list[int], evaluated: bool
):
    history = TokenHistory(VOCAB)
    history.start(3, prompt, before)
    history.start(1, [], [])
    found = came(history, [3, 1], [len(before), 0], [-1, -1])  # nothing new: not looked at
    for step, token in enumerate(output, start=1):
        counts = [len(before) + step, step]
        found = came(history, [3, 1], counts, [token, VOCAB - 1 - token])
        assert not evaluated or found == came(history, [3, 1], counts, [7, 7])  # counted once
    expected = Counter(before + output)
    expected.update(dict.fromkeys(prompt, IN_PROMPT))
    assert found == [expected, Counter(VOCAB - 1 - token for token in output)]


def test_who_is_not_asked_for_keeps_what_it_has():
    history = TokenHistory(VOCAB)
    for slot in range(20):  # the table grows
        history.start(slot, [slot], [])
    assert came(history, [4, 17], [1, 1], [5, 6]) == [{4: IN_PROMPT, 5: 1}, {17: IN_PROMPT, 6: 1}]
    assert came(history, [4, 9], [2, 0], [5, 8]) == [{4: IN_PROMPT, 5: 2}, {9: IN_PROMPT}]
    assert came(history, [17], [1], [0]) == [{17: IN_PROMPT, 6: 1}]


def test_a_slot_used_again_starts_empty():
    history = TokenHistory(VOCAB)
    history.start(0, [], [4, 4, 5])
    history.start(6, [], [8])
    history.stop(0)
    history.stop(0)
    history.stop(2)  # was never followed
    history.start(1, [], [7])
    assert came(history, [1, 6], [1, 1], [0, 0]) == [{7: 1}, {8: 1}]
    history.stop(1)
    history.stop(6)
    history.start(0, [], [])
    assert came(history, [0], [0], [0]) == [{}]


def test_a_token_that_nobody_told_of_is_noticed():
    history = TokenHistory(VOCAB)
    history.start(0, [], [1])
    with pytest.raises(AssertionError, match="passed by"):
        came(history, [0], [3], [2])
