import mlx.core as mx
import numpy as np
import pytest
from sampling_reference import logprobs as reference_logprobs

from mlxinfer.sampling.sampler import LogprobArrays

VOCAB = 3000


@pytest.fixture
def logits() -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(4, VOCAB)) * 3).astype(np.float32)


def test_each_row_gets_as_many_logprobs_as_it_asks_for(logits: np.ndarray):
    tokens = [5, 6, 7, 8]
    asked = {3: 2, 0: 20, 2: 0}
    found = LogprobArrays.of(mx.array(logits), mx.array(tokens, mx.int32), asked).read()
    assert set(found) == {0, 2, 3}
    for row, num in zip((3, 0, 2), (2, 20, 0), strict=True):
        expected = reference_logprobs(logits[row])
        assert found[row].logprob == pytest.approx(expected[tokens[row]], abs=1e-5)
        best = np.argsort(-expected)[:num]
        assert [token for token, _ in found[row].top] == best.tolist()
        assert [value for _, value in found[row].top] == pytest.approx(expected[best], abs=1e-5)


def test_a_vocabulary_smaller_than_asked_for_and_tokens_that_cannot_be():
    logits = mx.array([[0.0, -np.inf, 0.0]])
    arrays = LogprobArrays.of(logits, mx.array([0], mx.int32), {0: 20})
    found = arrays.read()[0]
    assert [token for token, _ in found.top] == [0, 2, 1]
    assert found.top[2][1] == -np.inf
