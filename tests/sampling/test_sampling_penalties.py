import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import VOCAB, rows
from sampling_reference import Row, adjusted_logits

from mlxinfer.core import SamplingParams
from mlxinfer.sampling.blocks import pad_rows
from mlxinfer.sampling.penalties import TokenHistory, penalise
from mlxinfer.sampling.plan import ROW, make_plan, row_of

STRENGTHS = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def only_penalties(row: Row) -> Row:
    params = SamplingParams(**{name: getattr(row.params, name) for name in STRENGTHS})
    return Row(params, row.logits, row.prompt_ids, row.output_ids)


def penalised(cases: list[Row], pending: list[int] | None = None) -> np.ndarray:
    """(R, VOCAB) logits after the penalties; tokens of `pending` come after those of the rows."""
    table = np.array([row_of(row.params, VOCAB) for row in cases], dtype=ROW)
    history = TokenHistory(spare=VOCAB)
    for slot, row in enumerate(cases):
        prompt = row.prompt_ids if row.params.repetition_penalty != 1 else ()
        history.start(slot, prompt, row.output_ids)
    plan = make_plan(tuple(range(len(cases))), table, {}, VOCAB)
    logits = pad_rows(mx.array(np.stack([row.logits for row in cases])))
    if plan.penalties is not None:
        newest = None if pending is None else mx.array(pending, mx.int32)
        logits = penalise(logits, plan.penalties, history, newest)
    assert mx.isinf(logits[:, VOCAB:]).all()
    return np.array(logits)[:, :VOCAB]


@given(cases=st.lists(rows(), min_size=1, max_size=5))
def test_exactly_the_reference(cases: list[Row]):
    cases = [only_penalties(row) for row in cases]
    expected = np.stack([adjusted_logits(row) for row in cases])
    np.testing.assert_array_equal(penalised(cases), expected)


@given(cases=st.lists(rows(), min_size=1, max_size=5), mixed=st.booleans())
def test_a_pending_token_counts_as_a_known_one(cases: list[Row], mixed: bool):
    cases = [only_penalties(row) for row in cases]
    pending = [row.output_ids[-1] if row.output_ids else -1 for row in cases]
    if mixed:
        pending[0] = -1
    before = [
        Row(row.params, row.logits, row.prompt_ids, row.output_ids[:-1]) if token >= 0 else row
        for row, token in zip(cases, pending, strict=True)
    ]
    np.testing.assert_array_equal(penalised(before, pending), penalised(cases))


@given(
    prompt=st.lists(st.integers(0, 20), max_size=10),
    output=st.lists(st.integers(0, 200), max_size=150),
)
def test_tokens_seen_one_by_one_make_the_history_of_all_at_once(
    prompt: list[int], output: list[int]
):
    grown, known = TokenHistory(spare=VOCAB), TokenHistory(spare=VOCAB)
    slots = np.array([3, 1])
    grown.start(3, prompt, [])
    grown.start(1, [], [])
    for token in output:
        grown.observe(slots, np.array([token, 200 - token], np.int32))
    known.start(3, prompt, output)
    known.start(1, [], [200 - token for token in output])
    assert as_dicts(grown, slots) == as_dicts(known, slots)
    assert grown.tables(slots)[0].shape == known.tables(slots)[0].shape


@pytest.mark.parametrize("strength", [1e-300, 1e300])
def test_absurd_strengths_give_no_nan(strength: float):
    logits = np.array([-1.0, 0.0, 1.0] * 100, np.float32)
    row = Row(SamplingParams(repetition_penalty=strength), logits, range(VOCAB))
    assert not np.isnan(penalised([row])).any()


def as_dicts(history: TokenHistory, slots: np.ndarray) -> list[dict[int, float]]:
    ids, counts = history.tables(slots)
    assert (counts[ids == VOCAB] == 0).all()
    found = [
        [(int(token), float(times)) for token, times in zip(*row, strict=True) if token != VOCAB]
        for row in zip(ids, counts, strict=True)
    ]
    assert all(len(dict(pairs)) == len(pairs) for pairs in found)  # each token once
    return [dict(pairs) for pairs in found]


def test_a_slot_used_again_starts_empty():
    history = TokenHistory(spare=VOCAB)
    history.start(0, [1, 2, 3], [4, 4])
    history.start(0, [7], [])
    assert as_dicts(history, np.array([0])) == [{7: 0.0}]
