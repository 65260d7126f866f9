"""Gated activations over gate and up projections that lie side by side. Knows no weights.

All are built on y * sigmoid(z): SiLU as it is, and the tanh form of GELU because
0.5 (1 + tanh(z)) = sigmoid(2 z).
"""

import math
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ..metal_kernels.gated import Gate, gate_of
from ..metal_kernels.gated import gated as gated_in_kernel

_Product = Callable[[mx.array, mx.array], mx.array]

_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GELU_ERF = ("gelu",)
_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715

ACTIVATIONS = (*_SILU, *_GELU_TANH, *_GELU_ERF)


class Gated:
    """[gate, up] (..., 2 * dims) -> act(gate) * up (..., dims).

    Fused into one kernel where that is free: MLX's compiled function, or, where the engine says so,
    our own, which takes the host half as long. On the CPU, MLX would call a compiler. The split
    stays outside of what is compiled: it has no rule for shapes that are left open.

    Args:
        product: of gate and up.
        gate: what our kernel makes of them; None: it has no such function.
        fused: compile the product; None: where there is Metal.
    """

    __slots__ = ("_product", "gate", "in_kernel")

    def __init__(
        self, product: _Product, gate: Gate | None = None, *, fused: bool | None = None
    ) -> None:
        fused = mx.metal.is_available() if fused is None else fused
        self._product = mx.compile(product, shapeless=True) if fused else product
        self.gate = gate
        self.in_kernel = False  # set by the engine

    def __call__(self, gate_up: mx.array) -> mx.array:
        """gate_up (..., 2 * dims) -> (..., dims)."""
        if self.in_kernel and self.gate is not None:
            return gated_in_kernel(gate_up, self.gate)
        gate, up = mx.split(gate_up, 2, axis=-1)
        return self._product(gate, up)


def gated(name: str, dtype: mx.Dtype) -> Gated:
    """The activation that a config's hidden_act names."""
    assert name in ACTIVATIONS, name
    if name in _GELU_ERF:
        return Gated(_geglu_erf)
    times_sigmoid = _times_sigmoid(dtype)
    if name in _SILU:
        return Gated(partial(_swiglu, times_sigmoid=times_sigmoid), gate_of("silu", dtype))
    return Gated(partial(_geglu_tanh, times_sigmoid=times_sigmoid), gate_of("gelu_tanh", dtype))


def clamped_swiglu(dtype: mx.Dtype, *, alpha: float, limit: float) -> Gated:
    """gpt-oss: the gate clamped from above, up from both sides, and (up + 1) instead of up."""
    times_sigmoid = _times_sigmoid(dtype)
    product = partial(_clamped_swiglu, alpha=alpha, limit=limit, times_sigmoid=times_sigmoid)
    return Gated(product, gate_of("clamped_swiglu", dtype, float(alpha), float(limit)))


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
