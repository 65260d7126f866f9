import mlx.core as mx
import numpy as np

from mlxinfer.core import SamplingParams
from mlxinfer.sampling.adjustments import Biases
from mlxinfer.sampling.plan import sparse_bias

SPARE = 6
STOP = frozenset({2, 4})


def added(params: SamplingParams, count: int) -> list[float]:
    """What is added to the logits of a request that has said `count` tokens, in row 1 of 2."""
    bias = sparse_bias(params, STOP)
    assert bias is not None
    logits = Biases([1], [bias], SPARE).apply(mx.zeros((2, 8)), np.array([9, count]))
    assert logits[0].tolist() == [0.0] * 8
    return logits[1].tolist()[:SPARE]


def test_nothing_asked_nothing_added():
    assert sparse_bias(SamplingParams(), STOP) is None
    assert sparse_bias(SamplingParams(min_tokens=3), frozenset()) is None


def test_end_tokens_are_forbidden_until_min_tokens_are_there():
    params = SamplingParams(min_tokens=2)
    forbidden = [0.0, 0.0, -np.inf, 0.0, -np.inf, 0.0]
    assert [added(params, count) for count in (0, 1, 2, 3)] == [forbidden] * 2 + [[0.0] * 6] * 2


def test_bias_lasts_also_on_a_token_that_was_forbidden():
    params = SamplingParams(min_tokens=1, logit_bias={2: 5.0, 0: -1.5})
    assert added(params, 0) == [-1.5, 0.0, -np.inf, 0.0, -np.inf, 0.0]
    assert added(params, 1) == [-1.5, 0.0, 5.0, 0.0, 0.0, 0.0]


def test_rows_of_different_length_do_not_touch_each_other():
    long = sparse_bias(SamplingParams(logit_bias={i: float(i) for i in range(1, 6)}), STOP)
    short = sparse_bias(SamplingParams(logit_bias={0: 7.0}), STOP)
    assert long is not None
    assert short is not None
    logits = mx.zeros((3, 7))
    logits[:, SPARE] = -mx.inf
    got = Biases([0, 2], [long, short], SPARE).apply(logits, np.zeros(3, np.int64))
    assert got[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -np.inf]
    assert got[1].tolist() == [0.0] * 6 + [-np.inf]
    assert got[2].tolist() == [7.0] + [0.0] * 5 + [-np.inf]
