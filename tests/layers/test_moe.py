"""Mixtures of experts against a loop over tokens and experts."""

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.layers.linear import Linear
from mlxinfer.layers.mlp import gated
from mlxinfer.layers.moe import (
    SORT_FROM,
    ExpertChoice,
    ExpertLinear,
    JoinedExperts,
    MoE,
    QuantizedExpertLinear,
)
from mlxinfer.metal_kernels.routing import SUM_EPS, Routing
from mlxinfer.models.quantization import QuantFormat
from mlxinfer.models.weights.matrix import StoredMatrix, fused_experts

HIDDEN, EXPERTS, K = 32, 5, 2


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def experts(rows: int, columns: int, *, seed: int, bits: int | None):
    """Stored experts, and the matrices and biases that they stand for."""
    weight = mx.array(normal(EXPERTS, rows, columns, seed=seed) / columns**0.5)
    bias = mx.array(normal(EXPERTS, rows, seed=seed + 50))
    if bits is None:
        return StoredMatrix(weight, bias), np.array(weight), np.array(bias)
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    plain = np.array(mx.dequantize(packed, scales, biases, group_size=32, bits=bits))
    return StoredMatrix(packed, bias, scales, biases, QuantFormat(32, bits)), plain, np.array(bias)


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
def test_mixture_equals_a_loop_over_experts(num_tokens, bits, kind, normalised):
    inner = 64
    gate, up, down = (
        experts(inner, HIDDEN, seed=0, bits=bits[0]),
        experts(inner, HIDDEN, seed=1, bits=bits[1]),
        experts(HIDDEN, inner, seed=2, bits=bits[2]),
    )
    router = normal(EXPERTS, HIDDEN, seed=3)
    gate_up = fused_experts([gate[0], up[0]])
    assert type(gate_up) is kind
    moe = MoE(
        router=Linear(mx.array(router)),
        choose=ExpertChoice(Routing(K, normalised=normalised)),
        gate_up_proj=gate_up,
        down_proj=down[0].expert_projection(),
        activation=gated("silu", mx.float32),
    )
    x, residual = normal(num_tokens, HIDDEN, seed=4), normal(num_tokens, HIDDEN, seed=5)
    expected = np.zeros_like(x)
    for t, row in enumerate(x):
        probabilities = np.exp(router @ row) / np.exp(router @ row).sum()
        chosen = np.argsort(probabilities)[-K:]
        total = probabilities[chosen].sum() if normalised else 1.0
        for e in chosen:
            middle = silu(gate[1][e] @ row + gate[2][e]) * (up[1][e] @ row + up[2][e])
            expected[t] += probabilities[e] / total * (down[1][e] @ middle + down[2][e])
    np.testing.assert_allclose(np.array(moe(mx.array(x))), expected, rtol=1e-3, atol=1e-4)
    added = moe(mx.array(x), mx.array(residual))
    np.testing.assert_allclose(np.array(added), residual + expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("groups", "best"), [(3, 2), (4, 1)])
@pytest.mark.parametrize(("biased", "counted"), [(False, 1), (False, 2), (True, 2)])
@pytest.mark.parametrize("normalise", [False, True])
def test_routing_in_groups_is_the_definition(groups, best, biased, counted, normalise):
    logits, bias = normal(20, 12, seed=0), np.abs(normal(12, seed=1)) / 3
    routing = Routing(
        2,
        sigmoid=biased,
        normalised=normalise,
        biased=biased,
        eps=SUM_EPS,
        factor=2.5,
        num_groups=groups,
        num_best=best,
        counted=counted,
    )
    choose = ExpertChoice(routing, mx.array(bias) if biased else None)
    weights, experts = (np.array(result) for result in choose(mx.array(logits)))
    for row, token in enumerate(logits):
        scores = 1 / (1 + np.exp(-token)) if biased else np.exp(token) / np.exp(token).sum()
        ranks = scores + bias if biased else scores
        worth = np.sort(ranks.reshape(groups, -1))[:, -counted:].sum(-1)
        open_groups = set(np.argsort(worth)[-best:].tolist())
        size = 12 // groups
        allowed = [e for e in range(12) if e // size in open_groups]
        chosen = sorted(allowed, key=lambda e: ranks[e])[-2:]
        total = scores[chosen].sum() if normalise else 1.0
        assert set(experts[row].tolist()) == set(chosen)
        for place, expert in enumerate(experts[row].tolist()):
            assert weights[row, place] == pytest.approx(2.5 * scores[expert] / total, rel=1e-4)
