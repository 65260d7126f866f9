import numpy as np
import pytest

from mlxinfer.core import DRY_BREAKERS, SamplingParams
from mlxinfer.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 10**400),
        ("min_tokens", 10**400),
        ("repetition_penalty", 1e300),
        ("top_n_sigma", 1e300),
        ("stop", "half \ud800"),
        ("dry_sequence_breakers", [str(i) for i in range(300)]),
    ],
)
def test_a_value_that_no_engine_can_use_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_params_have_a_hash() -> None:
    one, same = SamplingParams(logit_bias={3: 1.0}), SamplingParams(logit_bias={3: 1.0})
    assert hash(one) == hash(same)
    assert {one: 1}[same] == 1


def test_the_largest_numbers_that_are_taken_are_float32s() -> None:
    params = SamplingParams(repetition_penalty=3.4e38, max_tokens=2**63 - 1, stop="\U0001f600")
    assert np.isfinite(np.float32(params.repetition_penalty))
    assert params.dry_sequence_breakers == DRY_BREAKERS
