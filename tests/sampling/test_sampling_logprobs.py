import mlx.core as mx
import numpy as np
import pytest
from sampling_reference import logprobs as reference_logprobs

from mlxinfer.sampling.logprobs import compute_logprobs, logprob_rows, read_logprobs

VOCAB = 3000


@pytest.fixture
def logits() -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(4, VOCAB)) * 3).astype(np.float32)


def test_each_row_gets_as_many_logprobs_as_it_asks_for(logits: np.ndarray):
    tokens = [5, 6, 7, 8]
    asked = logprob_rows([3, 0, 2], [2, 20, 0])
    found = read_logprobs(compute_logprobs(mx.array(logits), mx.array(tokens, mx.int32), asked))
    assert set(found) == {0, 2, 3}
    for row, num in zip((3, 0, 2), (2, 20, 0), strict=True):
        expected = reference_logprobs(logits[row])
        assert found[row].logprob == pytest.approx(expected[tokens[row]], abs=1e-5)
        best = np.argsort(-expected)[:num]
        assert [token for token, _ in found[row].top] == best.tolist()
        assert [value for _, value in found[row].top] == pytest.approx(expected[best], abs=1e-5)


def test_only_the_chosen_one():
    asked = logprob_rows([0], [0])
    arrays = compute_logprobs(mx.zeros((1, 4)), mx.array([1], mx.int32), asked)
    assert len(arrays.arrays()) == 1
    assert read_logprobs(arrays)[0].logprob == pytest.approx(np.log(0.25))
    assert read_logprobs(arrays)[0].top == ()


def test_a_vocabulary_smaller_than_asked_for_and_tokens_that_cannot_be():
    logits = mx.array([[0.0, -np.inf, 0.0]])
    arrays = compute_logprobs(logits, mx.array([0], mx.int32), logprob_rows([0], [20]))
    found = read_logprobs(arrays)[0]
    assert [token for token, _ in found.top] == [0, 2, 1]
    assert found.top[2][1] == -np.inf


def test_logprobs_are_plain_python(logits: np.ndarray):
    arrays = compute_logprobs(mx.array(logits), mx.zeros(4, mx.int32), logprob_rows([1], [1]))
    found = read_logprobs(arrays)[1]
    assert type(found.logprob) is float
    assert [tuple(map(type, pair)) for pair in found.top] == [(int, float)]


def test_rows_alone_and_together_agree_exactly(logits: np.ndarray):
    tokens = mx.array([1, 2, 3, 4], mx.int32)
    together = read_logprobs(
        compute_logprobs(mx.array(logits), tokens, logprob_rows(range(4), [3, 20, 0, 7]))
    )
    for row, num in enumerate([3, 20, 0, 7]):
        one = slice(row, row + 1)
        alone = compute_logprobs(mx.array(logits[one]), tokens[one], logprob_rows([0], [num]))
        assert read_logprobs(alone)[0] == together[row]
