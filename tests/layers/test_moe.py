"""Mixtures of experts against a loop over tokens and experts."""

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.layers.activations import gated
from mlxinfer.layers.linear import Linear
from mlxinfer.layers.moe import (
    SORT_FROM,
    ExpertLinear,
    JoinedExperts,
    MoE,
    QuantizedExpertLinear,
    softmax_top_k,
    top_k_softmax,
)
from mlxinfer.models.fuse import fuse_experts

HIDDEN, INNER, EXPERTS, K = 32, 64, 5, 2


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expert_projection(rows: int, columns: int, *, seed: int, bits: int | None):
    """Stacked experts, and the matrices and biases that they stand for."""
    weight = mx.array(normal(EXPERTS, rows, columns, seed=seed) / columns**0.5)
    bias = mx.array(normal(EXPERTS, rows, seed=seed + 50))
    if bits is None:
        return ExpertLinear(weight, bias), np.array(weight), np.array(bias)
    form = {"group_size": 32, "bits": bits, "mode": "affine"}
    packed = mx.quantize(weight, **form)
    plain = np.array(mx.dequantize(*packed, **form))
    return QuantizedExpertLinear(*packed, bias, **form), plain, np.array(bias)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("num_tokens", [1, 3, SORT_FROM // K, 41])
@pytest.mark.parametrize(
    ("bits", "kind"),
    [
        ((None, None, None), ExpertLinear),
        ((4, 4, 4), QuantizedExpertLinear),
        ((4, 8, 4), JoinedExperts),
    ],
)
@pytest.mark.parametrize("normalised", [True, False])
def test_experts_are_a_loop(num_tokens, bits, kind, normalised):
    gate, up, down = (
        expert_projection(INNER, HIDDEN, seed=0, bits=bits[0]),
        expert_projection(INNER, HIDDEN, seed=1, bits=bits[1]),
        expert_projection(HIDDEN, INNER, seed=2, bits=bits[2]),
    )
    router = normal(EXPERTS, HIDDEN, seed=3)
    fused = fuse_experts([gate[0], up[0]])
    assert type(fused) is kind
    moe = MoE(
        router=Linear(mx.array(router)),
        choose=top_k_softmax(K) if normalised else softmax_top_k(K),
        gate_up_proj=fused,
        down_proj=down[0],
        activation=gated("silu", mx.float32),
    )
    x, residual = normal(num_tokens, HIDDEN, seed=4), normal(num_tokens, HIDDEN, seed=5)
    expected = np.zeros_like(x)
    for t, row in enumerate(x):
        probabilities = np.exp(router @ row) / np.exp(router @ row).sum()
        chosen = np.argsort(probabilities)[-K:]
        total = probabilities[chosen].sum() if normalised else 1.0
        for e in chosen:
            inner = silu(gate[1][e] @ row + gate[2][e]) * (up[1][e] @ row + up[2][e])
            expected[t] += probabilities[e] / total * (down[1][e] @ inner + down[2][e])
    np.testing.assert_allclose(np.array(moe(mx.array(x))), expected, rtol=1e-3, atol=1e-4)
    onto = moe.onto(mx.array(residual), mx.array(x))
    np.testing.assert_allclose(np.array(onto), residual + expected, rtol=1e-3, atol=1e-4)
