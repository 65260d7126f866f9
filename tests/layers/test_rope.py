"""Rotary embeddings: published frequencies, the definition, and the property that matters."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.layers.rope import (
    FusedRope,
    RopeSpec,
    inverse_frequencies,
    scale_factor,
    yarn_attention_factor,
)

HEAD_DIM = 24

SPECS = {
    "default": RopeSpec(dims=24),
    "partial": RopeSpec(dims=8, theta=500.0),
    "linear": RopeSpec(dims=24, kind="linear", factor=4.0),
    "llama3": RopeSpec(dims=24, kind="llama3", factor=8.0, original_context=64),
    "yarn": RopeSpec(dims=24, kind="yarn", factor=8.0, original_context=64, attention_factor=1.2),
    "partial yarn": RopeSpec(
        dims=16, kind="yarn", factor=4.0, original_context=32, attention_factor=1.3
    ),
}


def rotate(x: np.ndarray, positions: list[int], spec: RopeSpec) -> np.ndarray:
    """The definition, pair by pair: dimension i turns with dimension i + dims / 2."""
    result = x.astype(np.float64)
    half = spec.dims // 2
    for t, position in enumerate(positions):
        for i, frequency in enumerate(inverse_frequencies(spec)):
            c, s = math.cos(position * frequency), math.sin(position * frequency)
            a, b = x[t, :, i].astype(np.float64), x[t, :, i + half].astype(np.float64)
            result[t, :, i], result[t, :, i + half] = a * c - b * s, b * c + a * s
    if spec.dims < x.shape[-1]:
        result[..., : spec.dims] *= spec.attention_factor
    return result


@pytest.mark.parametrize("name", SPECS)
def test_ropes_equal_their_definition(name):
    spec = SPECS[name]
    positions = [0, 1, 7, 300, 3]
    x = np.random.default_rng(0).standard_normal((5, 3, HEAD_DIM)).astype(np.float32)
    rope = FusedRope(spec, HEAD_DIM, mx.float32)
    turned = rope(mx.array(x), rope.prepare(mx.array(positions, mx.int32)))
    np.testing.assert_allclose(np.array(turned), rotate(x, positions, spec), atol=2e-4)


def test_ropes_keep_the_dtype():
    rope = FusedRope(SPECS["partial yarn"], HEAD_DIM, mx.bfloat16)
    x = mx.ones((2, 1, HEAD_DIM), mx.bfloat16)
    assert rope(x, rope.prepare(mx.arange(2))).dtype == mx.bfloat16


@given(
    st.sampled_from(sorted(SPECS)), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500)
)
def test_scores_depend_on_the_distance_alone(name, at, of, shift):
    rope = FusedRope(SPECS[name], HEAD_DIM, mx.float32)
    q, k = mx.random.normal((2, 1, 1, HEAD_DIM), key=mx.random.key(1))

    def score(q_position: int, k_position: int) -> float:
        turned = [
            rope(x, rope.prepare(mx.array([p]))) for x, p in ((q, q_position), (k, k_position))
        ]
        return mx.sum(turned[0] * turned[1]).item()

    assert score(at, of) == pytest.approx(score(at + shift, of + shift), abs=2e-3)


def test_llama3_keeps_fast_pairs_and_slows_slow_ones():
    spec = RopeSpec(dims=128, theta=500_000.0, kind="llama3", factor=8.0, original_context=8192)
    plain = inverse_frequencies(RopeSpec(dims=128, theta=500_000.0))
    scaled = inverse_frequencies(spec)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)
    between = [s / p for s, p in zip(scaled, plain, strict=True) if 0.126 < s / p < 0.999]
    assert between == sorted(between, reverse=True)
    assert len(between) >= 5


def test_yarn_rounds_its_range_only_with_truncate():
    """The rounding moves single frequencies of gpt-oss by up to 76 %."""
    stated = {
        "dims": 64, "theta": 150_000.0, "kind": "yarn", "factor": 32.0, "original_context": 4096
    }  # fmt: skip
    exact = inverse_frequencies(RopeSpec(**stated, truncate=False))
    rounded = inverse_frequencies(RopeSpec(**stated, truncate=True))
    off = [abs(r / e - 1) for r, e in zip(rounded, exact, strict=True)]
    assert max(off) == pytest.approx(0.76, abs=0.02)
    assert off.index(max(off)) == 17
    assert off[0] == off[-1] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((32.0,), 0.1 * math.log(32) + 1), ((1.0,), 1.0), ((8.0, 1.0, 1.0), 1.0), ((8.0, 0.7), None)],
)
def test_yarn_attention_factor(arguments, expected):
    expected = 0.1 * math.log(8) + 1 if expected is None else expected
    assert yarn_attention_factor(*arguments) == pytest.approx(expected)


def test_attention_factor_goes_to_the_scale_where_whole_heads_turn():
    assert scale_factor(SPECS["yarn"], HEAD_DIM) == pytest.approx(1.44)
    assert scale_factor(SPECS["partial yarn"], HEAD_DIM) == 1.0
