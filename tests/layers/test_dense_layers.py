"""Norms, activations and projections against their definitions in numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.layers.linear import (
    DenseEmbedding,
    Joined,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)
from mlxinfer.layers.mlp import ACTIVATIONS, clamped_swiglu, gated
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.models.quantization import QuantFormat
from mlxinfer.models.weights.matrix import StoredMatrix, fused


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 16)])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_norms_equal_their_definition(shape, size):
    x, weight, eps = normal(*shape) * size, normal(*shape[1:], seed=1), 1e-5
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    norm = RMSNorm(mx.array(weight), eps)
    np.testing.assert_allclose(np.array(norm(mx.array(x))), expected, rtol=1e-4, atol=1e-6)


def expected_activation(name: str, gate: np.ndarray) -> np.ndarray:
    if name in ("silu", "swish"):
        return gate * sigmoid(gate)
    if name == "gelu":
        return gate * np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))))(gate)
    return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_activations(name, dtype):
    gate, up = 4 * normal(3, 32), normal(3, 32, seed=1)
    gate[0, :4] = [0, 200, -200, -88]
    y = gated(name, dtype)(mx.array(np.concatenate([gate, up], -1)).astype(dtype))
    assert y.dtype == dtype
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == mx.float32 else {"rtol": 0.05, "atol": 0.05}
    expected = expected_activation(name, gate) * up
    np.testing.assert_allclose(np.array(y.astype(mx.float32)), expected, **close)


def test_clamped_swiglu():
    gate, up = 4 * normal(3, 32), 4 * normal(3, 32, seed=1)
    y = clamped_swiglu(mx.float32, alpha=1.702, limit=2.0)(mx.array(np.concatenate([gate, up], -1)))
    low = np.minimum(gate, 2.0)
    expected = low * sigmoid(1.702 * low) * (np.clip(up, -2, 2) + 1)
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 93])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "bits", "kind"),
    [(24, None, Linear), (24, 8, QuantizedLinear), (96, 4, QuantizedLinear)],
)
def test_projections_and_their_sum_with_a_residual(num_tokens, bias, rows, bits, kind):
    stored, weight, offset = projection(rows, seed=0, bias=bias, bits=bits)
    layer = stored.projection()
    assert type(layer) is kind
    check_projection(layer, weight, offset, num_tokens)


def check_projection(layer, weight: np.ndarray, offset: np.ndarray, num_tokens: int) -> None:
    x, residual = normal(num_tokens, 64, seed=2), normal(num_tokens, len(weight), seed=3)
    expected = x @ weight.T + offset
    np.testing.assert_allclose(np.array(layer(mx.array(x))), expected, rtol=1e-4, atol=1e-4)
    added = layer(mx.array(x), mx.array(residual))
    np.testing.assert_allclose(np.array(added), residual + expected, rtol=1e-4, atol=1e-4)


def projection(rows: int, *, seed: int, bias: bool = True, bits: int | None = None):
    """A stored matrix of 64 inputs, the numbers that it stands for, and its bias."""
    weight = mx.array(normal(rows, 64, seed=seed))
    offset = mx.array(normal(rows, seed=seed + 50)) if bias else None
    shown = np.zeros(rows) if offset is None else np.array(offset)
    if bits is None:
        return StoredMatrix(weight, offset), np.array(weight), shown
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    plain = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
    return (
        StoredMatrix(packed, offset, scales, biases, QuantFormat(32, bits)),
        np.array(plain),
        shown,
    )


@pytest.mark.parametrize(
    ("bits", "joined"),
    [([None, None, None], False), ([4, 4, 4], False), ([4, 4, 8], True), ([4, None, 4], True)],
)
def test_fusing_gives_the_outputs_side_by_side(bits, joined):
    parts = [projection(32 * (i + 1), seed=i, bits=b) for i, b in enumerate(bits)]
    weight, offset = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    layer = fused([stored for stored, _, _ in parts])
    assert (type(layer) is Joined) == joined
    check_projection(layer, weight, offset, 3)


def test_embeddings_and_their_use_as_output():
    stored, table, _ = projection(64, seed=0, bias=False, bits=8)
    ids, x = [3, 0, 63, 32, 31, 3], normal(2, 64, seed=5)
    weight = mx.array(table)
    for embedding in (
        DenseEmbedding(weight),
        QuantizedEmbedding(stored.projection(), mx.float32),
    ):
        rows = len(embedding.as_linear()(mx.array(x))[0])
        known = [i for i in ids if i < rows]
        found = np.array(embedding(mx.array(known)))
        np.testing.assert_allclose(found, table[known], rtol=1e-6, atol=1e-6)
        logits = np.array(embedding.as_linear()(mx.array(x)))
        np.testing.assert_allclose(logits, x @ table[:rows].T, rtol=1e-4, atol=1e-4)
