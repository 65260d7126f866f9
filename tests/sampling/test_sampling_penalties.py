import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import VOCAB, rows
from sampling_reference import Row, adjusted_logits

from mlxinfer.core import SamplingParams
from mlxinfer.sampling.adjustments import TokenHistory, penalise, prompt_mask
from mlxinfer.sampling.draw import pad_rows
from mlxinfer.sampling.plan import ROW, make_plan, row_of

STRENGTHS = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def only_penalties(row: Row) -> Row:
    params = SamplingParams(**{name: getattr(row.params, name) for name in STRENGTHS})
    return Row(params, row.logits, row.prompt_ids, row.output_ids)


def penalised(cases: list[Row], pending: list[int] | None = None) -> np.ndarray:
    """(R, VOCAB) logits after the penalties; tokens of `pending` come after those of the rows."""
    table = np.array([row_of(row.params, VOCAB) for row in cases], dtype=ROW)
    history = TokenHistory(spare=VOCAB)
    prompts = {}
    for slot, row in enumerate(cases):
        history.start(slot, row.output_ids, counted=row.params.frequency_penalty != 0)
        if row.params.repetition_penalty != 1:
            prompts[slot] = prompt_mask(row.prompt_ids, VOCAB)
    plan = make_plan(tuple(range(len(cases))), table, {}, prompts, VOCAB)
    logits = pad_rows(mx.array(np.stack([row.logits for row in cases])))
    if plan.penalties is not None:
        newest = None if pending is None else mx.array(pending, mx.int32)[:, None]
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


@pytest.mark.parametrize("strength", [1e-300, 1e300])
def test_absurd_strengths_give_no_nan(strength: float):
    logits = np.array([-1.0, 0.0, 1.0] * 100, np.float32)
    row = Row(SamplingParams(repetition_penalty=strength), logits, range(VOCAB))
    assert not np.isnan(penalised([row])).any()
