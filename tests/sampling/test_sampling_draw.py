import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import draw as reference_draw

from mlxinfer.sampling.draw import draw, total_weight

ALMOST_ONE = 1 - 2**-24


def drawn(weights: np.ndarray, numbers: list[float]) -> list[int]:
    rows = np.broadcast_to(weights.astype(np.float32), (len(numbers), len(weights)))
    uniforms = mx.array(np.array(numbers, np.float32))
    return draw(mx.array(rows), uniforms).tolist()


@given(seed=st.integers(0, 2**32), sparse=st.booleans(), uniform=st.integers(0, 2**24 - 1))
def test_draws_as_the_reference(seed: int, sparse: bool, uniform: int):
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=384) ** 3
    if sparse:
        weights[rng.random(384) < 0.97] = 0
        weights[rng.integers(384)] = 1
    (token,) = drawn(weights, [uniform / 2**24])
    assert token in reference_draw(weights / weights.sum(), uniform / 2**24)


@given(seed=st.integers(0, 2**32), zeros=st.floats(0, 0.99), scale=st.floats(-30, 0))
def test_never_a_token_of_weight_zero_at_either_end(seed: int, zeros: float, scale: float):
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random(1024) < zeros, 0, rng.random(1024) * 10**scale)
    weights[rng.integers(1024)] = 1
    first, last = np.flatnonzero(weights)[[0, -1]]
    low, high = drawn(weights, [0.0, ALMOST_ONE])
    assert low == first
    assert weights[high] > 0
    assert high <= last


def test_where_rounding_leaves_no_token_beyond_the_last_one_of_weight_is_drawn():
    weights = np.zeros(256)
    weights[:8] = 1
    weights[9] = 1e-12  # lost in the sum, so that nothing lies beyond 8
    assert drawn(weights, [1.0]) == [9]


def test_a_row_without_weight_gives_a_token_and_no_error():
    assert drawn(np.zeros(128), [0.3]) == [0]


def test_total_does_not_depend_on_other_rows():
    rows = mx.array(np.random.default_rng(0).random((5, 640)).astype(np.float32))
    alone = mx.concatenate([total_weight(rows[i : i + 1]) for i in range(5)])
    assert alone.tolist() == total_weight(rows).tolist()
    np.testing.assert_allclose(alone[:, 0], np.array(rows).sum(-1), rtol=1e-5)
