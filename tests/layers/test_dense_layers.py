"""Norms, activations and projections against their definitions in numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.layers import cpu
from mlxinfer.layers.cpu import (
    UNPACK_FROM,
    CPULayerFactory,
    LeanRMSNorm,
    TiledEmbedding,
    TiledLinear,
    UnpackedLinear,
    WideExpertsLayerFactory,
    attend_with_numpy,
    gelu_with_numpy,
    layer_factory,
    tiled,
)
from mlxinfer.layers.factory import LayerFactory
from mlxinfer.layers.linear import (
    DenseEmbedding,
    Joined,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
)
from mlxinfer.layers.mlp import ACTIVATIONS, PLAIN, Gated, clamped_swiglu, gated
from mlxinfer.layers.norm import HeadRMSNorm, RMSNorm
from mlxinfer.models.quantization import QuantFormat
from mlxinfer.models.weights.matrix import StoredMatrix, fused

FACTORIES = [LayerFactory(), CPULayerFactory()]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 16)])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_norms_equal_their_definition(shape, size):
    x, weight, eps = normal(*shape) * size, normal(*shape[1:], seed=1), 1e-5
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    fused = RMSNorm if weight.ndim == 1 else HeadRMSNorm
    for norm in (fused(mx.array(weight), eps), LeanRMSNorm(mx.array(weight), eps)):
        np.testing.assert_allclose(np.array(norm(mx.array(x))), expected, rtol=1e-4, atol=1e-6)


def test_half_precision_takes_the_fused_norm():
    """Its sums are float32: squares of values this large overflow float16."""
    norm = CPULayerFactory().norm(mx.ones((64,), mx.float16), 1e-5)
    y = norm(mx.full((1, 64), 300.0, mx.float16))
    assert y.dtype == mx.float16
    assert y[0, 0].item() == pytest.approx(1.0, abs=1e-2)


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


def test_a_fused_activation_takes_any_number_of_tokens():
    activation = Gated(lambda gate, up: gate * mx.sigmoid(gate) * up, fused=True)
    for tokens in (1, 3, 2):
        x = mx.array(normal(tokens, 8))
        gate, up = np.split(np.array(x), 2, axis=-1)
        np.testing.assert_allclose(np.array(activation(x)), gate * sigmoid(gate) * up, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5, UNPACK_FROM, 64, 93, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "bits", "kinds"),
    [
        (24, None, (Linear, Linear)),
        (96, None, (Linear, TiledLinear)),
        (524, None, (Linear, TiledLinear)),  # 20 are missing from the last tile
        (24, 8, (QuantizedLinear, UnpackedLinear)),
        (96, 4, (QuantizedLinear, UnpackedLinear)),
    ],
)
def test_projections_and_their_sum_with_a_residual(num_tokens, bias, rows, bits, kinds):
    stored, weight, offset = projection(rows, seed=0, bias=bias, bits=bits)
    for make, kind in zip(FACTORIES, kinds, strict=True):
        layer = stored.projection(make)
        assert type(layer) is kind
        check_projection(layer, weight, offset, num_tokens)


def test_forms_for_the_cpu_are_chosen_by_the_machine_and_one_switch(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert type(layer_factory()) is CPULayerFactory
    monkeypatch.setenv(cpu.SWITCH, "0")
    assert type(layer_factory()) is WideExpertsLayerFactory
    monkeypatch.delenv(cpu.SWITCH)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert type(layer_factory()) is LayerFactory


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


def test_a_large_matrix_is_not_dequantised_as_a_whole(monkeypatch):
    stored, weight, offset = projection(96, seed=0, bits=4)
    monkeypatch.setattr(cpu, "MAX_UNPACKED", 96 * 64 - 1)
    layer = stored.projection(CPULayerFactory())
    assert type(layer) is QuantizedLinear
    check_projection(layer, weight, offset, UNPACK_FROM)


@pytest.mark.parametrize(
    ("bits", "joined"),
    [([None, None, None], False), ([4, 4, 4], False), ([4, 4, 8], True), ([4, None, 4], True)],
)
def test_fusing_gives_the_outputs_side_by_side(bits, joined):
    parts = [projection(32 * (i + 1), seed=i, bits=b) for i, b in enumerate(bits)]
    weight, offset = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    for make in FACTORIES:
        layer = fused([stored for stored, _, _ in parts], make)
        assert (type(layer) is Joined) == joined
        check_projection(layer, weight, offset, 3)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_not_tiled(dtype):
    layer = CPULayerFactory().linear(mx.ones((64, 64), dtype))
    assert type(layer) is Linear
    assert layer(mx.ones((1, 64), dtype)).dtype == dtype


def test_embeddings_and_their_use_as_output():
    stored, table, _ = projection(64, seed=0, bias=False, bits=8)
    ids, x = [3, 0, 63, 32, 31, 3], normal(2, 64, seed=5)
    weight = mx.array(table)
    assert type(CPULayerFactory().embedding(weight, shared=True)) is TiledEmbedding
    assert type(CPULayerFactory().embedding(weight, shared=False)) is DenseEmbedding
    for embedding in (
        *(make.embedding(weight, shared=True) for make in FACTORIES),
        CPULayerFactory().embedding(weight, shared=False),
        CPULayerFactory().embedding(weight[:63], shared=True),
        QuantizedEmbedding(stored.projection(LayerFactory()), mx.float32),
    ):
        rows = len(embedding.as_linear()(mx.array(x))[0])
        known = [i for i in ids if i < rows]
        found = np.array(embedding(mx.array(known)))
        np.testing.assert_allclose(found, table[known], rtol=1e-6, atol=1e-6)
        logits = np.array(embedding.as_linear()(mx.array(x)))
        np.testing.assert_allclose(logits, x @ table[:rows].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("in_dims", "block_rows"), [(64, 32), (1536, 16), (4096, None)])
def test_many_rows_are_multiplied_in_blocks_that_fit(in_dims: int, block_rows: int | None) -> None:
    """Of whole blocks, or nearly: 62 rows of 64 are worth two of padding, 50 are not."""
    weight = mx.array(normal(64, in_dims, seed=1))
    layer = TiledLinear(tiled(weight))
    assert (layer.block_rows < 1000) == (block_rows is not None)
    assert block_rows in (None, layer.block_rows)
    for num_tokens in (64, 62, 50, 33):
        x = mx.array(normal(num_tokens, in_dims, seed=2))
        found, expected = layer(x), x @ weight.T
        assert found.shape == expected.shape
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 7), (40, 1000), (0, 5)])
def test_gelu_of_numpy_is_that_of_mlx(shape):
    """In one block and in several."""
    x = mx.random.normal(shape, scale=4.0, key=mx.random.key(3))
    np.testing.assert_allclose(gelu_with_numpy(x), PLAIN["gelu"](x), atol=1e-6)
    half = x.astype(mx.float16)
    assert gelu_with_numpy(half).dtype == mx.float16


def test_infinite_activations_stay_so_without_a_warning_of_numpy():
    """NaN and infinity reach the result, where they fail the one request."""
    x = mx.array([mx.inf, -mx.inf, mx.nan, 2.0**127, -(2.0**127)])
    np.testing.assert_array_equal(gelu_with_numpy(x), [np.inf, np.nan, np.nan, 2.0**127, 0])
    heads = mx.full((1, 1, 5, 8), mx.inf)
    assert np.isnan(attend_with_numpy(heads, heads, heads, scale=1.0)).all()


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("mask", [None, "window", "causal"])
def test_attention_with_exponentials_of_numpy_is_that_of_mlx(kv_heads, mask):
    """Scores far apart too, where exponentials would overflow without the greatest taken off."""
    count, heads, length, dim = 3, 6, 13, 8
    queries, keys, values = (
        mx.random.normal((count, each, length, dim), scale=9.0, key=mx.random.key(seed))
        for seed, each in enumerate((heads, kv_heads, kv_heads))
    )
    if mask == "window":
        mask = mx.abs(mx.arange(length)[:, None] - mx.arange(length)) < 4
    given = {"scale": 0.5, "mask": mask}
    found = attend_with_numpy(queries, keys, values, **given)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, **given)
    np.testing.assert_allclose(found, expected, atol=1e-4)
