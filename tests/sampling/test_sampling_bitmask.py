import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.sampling.sampler import apply_bitmask, num_words


def pack(allowed: np.ndarray) -> mx.array:
    """(R, V) bool -> (R, words) uint32, bit by bit."""
    words = np.zeros((len(allowed), num_words(allowed.shape[1])), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return mx.array(words)


@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from([1, 31, 32, 33, 100]))
def test_only_allowed_tokens_keep_their_logits(seed: int, vocab_size: int):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, vocab_size)).astype(np.float32)
    allowed = rng.random((3, vocab_size)) < 0.5
    got = apply_bitmask(mx.array(x), pack(allowed))
    np.testing.assert_array_equal(got, np.where(allowed, x, -np.inf))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_keeps_the_type(dtype: mx.Dtype):
    mask = mx.array([[0xFFFFFFFF, 0x80000000]], mx.uint32)
    got = apply_bitmask(mx.zeros((1, 64), dtype), mask)
    assert got.dtype == dtype
    assert (got == 0).tolist() == [[True] * 32 + [False] * 31 + [True]]


def test_a_mask_of_another_size_is_a_mistake():
    with pytest.raises(AssertionError):
        apply_bitmask(mx.zeros((1, 64)), mx.zeros((1, 1), mx.uint32))
