"""Gated activations over gate and up projections that lie side by side. Knows no weights.

All are built on y * sigmoid(z): SiLU as it is, and the tanh form of GELU because
0.5 (1 + tanh(z)) = sigmoid(2 z).
"""

import math
from collections.abc import Callable
from functools import partial

import mlx.core as mx

Gated = Callable[[mx.array], mx.array]
_Product = Callable[[mx.array, mx.array], mx.array]

_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GELU_ERF = ("gelu",)
_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715

ACTIVATIONS = (*_SILU, *_GELU_TANH, *_GELU_ERF)


def gated(name: str, dtype: mx.Dtype) -> Gated:
    """[gate, up] (..., 2 * dims) -> act(gate) * up (..., dims); `name` is a config's hidden_act."""
    assert name in ACTIVATIONS, name
    if name in _GELU_ERF:
        return _halves(_geglu_erf)
    product = _swiglu if name in _SILU else _geglu_tanh
    return _halves(partial(product, times_sigmoid=_times_sigmoid(dtype)))


def clamped_swiglu(dtype: mx.Dtype, *, alpha: float, limit: float) -> Gated:
    """gpt-oss: the gate clamped from above, up from both sides, and (up + 1) instead of up."""
    times_sigmoid = _times_sigmoid(dtype)
    return _halves(partial(_clamped_swiglu, alpha=alpha, limit=limit, times_sigmoid=times_sigmoid))


def _swiglu(gate: mx.array, up: mx.array, *, times_sigmoid: _Product) -> mx.array:
    return times_sigmoid(gate, gate) * up


def _geglu_tanh(gate: mx.array, up: mx.array, *, times_sigmoid: _Product) -> mx.array:
    doubled = gate * (_GELU_SLOPE + _GELU_SLOPE * _GELU_CUBIC * mx.square(gate))
    return times_sigmoid(gate, doubled) * up


def _geglu_erf(gate: mx.array, up: mx.array) -> mx.array:
    return 0.5 * gate * (1 + mx.erf(gate * math.sqrt(0.5))) * up


def _clamped_swiglu(
    gate: mx.array, up: mx.array, *, alpha: float, limit: float, times_sigmoid: _Product
) -> mx.array:
    gate = mx.minimum(gate, limit)
    return times_sigmoid(gate, alpha * gate) * (mx.clip(up, -limit, limit) + 1)


def _times_sigmoid(dtype: mx.Dtype) -> _Product:
    """y, z -> y * sigmoid(z). On the CPU, MLX takes a power in a third of sigmoid's time."""
    if mx.metal.is_available() or dtype != mx.float32:
        return lambda y, z: y * mx.sigmoid(z)
    base, one = mx.array(math.exp(-1), mx.float32), mx.array(1, mx.float32)
    return lambda y, z: y / (one + mx.power(base, z))


def _halves(product: _Product, *, fused: bool | None = None) -> Gated:
    """`product` of the two halves of the last axis.

    Fused into one kernel where that is free; on the CPU, MLX would call a compiler. The split stays
    outside: it has no rule for shapes that a compiled function leaves open.
    """
    if mx.metal.is_available() if fused is None else fused:
        product = mx.compile(product, shapeless=True)

    def activation(gate_up: mx.array) -> mx.array:
        gate, up = mx.split(gate_up, 2, axis=-1)
        return product(gate, up)

    return activation
