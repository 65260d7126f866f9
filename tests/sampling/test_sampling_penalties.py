import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import VOCAB, changed, rows
from sampling_reference import Row, adjusted_logits

from mlxinfer.core import SamplingParams

FIELDS = (
    "repetition_penalty",
    "repetition_window",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
)


def only_penalties(row: Row) -> Row:
    params = SamplingParams(**{name: getattr(row.params, name) for name in FIELDS})
    return Row(params, row.logits, row.prompt_ids, row.output_ids, row.stop_ids)


@given(cases=st.lists(rows(), min_size=1, max_size=5))
def test_exactly_the_reference(cases: list[Row]):
    cases = [only_penalties(row) for row in cases]
    expected = np.stack([adjusted_logits(row) for row in cases])
    np.testing.assert_array_equal(changed(cases), expected)


@pytest.mark.parametrize("strength", [1e-38, 1e38])
def test_absurd_strengths_give_no_nan(strength: float):
    logits = np.array([-1.0, 0.0, 1.0] * 100, np.float32)
    row = Row(SamplingParams(repetition_penalty=strength), logits, range(VOCAB))
    assert not np.isnan(changed([row])).any()
