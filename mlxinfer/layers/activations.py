"""Gated activations over gate and up projections that lie side by side. Knows no weights."""

import math
from collections.abc import Callable
from functools import partial

import mlx.core as mx

Gated = Callable[[mx.array], mx.array]

_GELU_SLOPE = math.sqrt(2 / math.pi)


def _swiglu(gate_up: mx.array) -> mx.array:
    gate, up = mx.split(gate_up, 2, axis=-1)
    return gate * mx.sigmoid(gate) * up


def _geglu_tanh(gate_up: mx.array) -> mx.array:
    gate, up = mx.split(gate_up, 2, axis=-1)
    inner = _GELU_SLOPE * (gate + 0.044715 * gate * gate * gate)
    return 0.5 * gate * (1 + mx.tanh(inner)) * up


def _geglu_erf(gate_up: mx.array) -> mx.array:
    gate, up = mx.split(gate_up, 2, axis=-1)
    return 0.5 * gate * (1 + mx.erf(gate * math.sqrt(0.5))) * up


def _clamped_swiglu(gate_up: mx.array, *, alpha: float, limit: float) -> mx.array:
    gate, up = mx.split(gate_up, 2, axis=-1)
    gate = mx.minimum(gate, limit)
    up = mx.clip(up, -limit, limit)
    return gate * mx.sigmoid(alpha * gate) * (up + 1)


_BY_NAME: dict[str, Gated] = {
    "silu": _swiglu,
    "swish": _swiglu,
    "gelu_pytorch_tanh": _geglu_tanh,
    "gelu_new": _geglu_tanh,
    "gelu_fast": _geglu_tanh,
    "gelu": _geglu_erf,
}

ACTIVATIONS = tuple(_BY_NAME)


def gated(name: str) -> Gated:
    """[gate, up] (..., 2 * dims) -> act(gate) * up (..., dims); `name` is a config's hidden_act."""
    return _fused(_BY_NAME[name])


def clamped_swiglu(*, alpha: float, limit: float) -> Gated:
    """gpt-oss: the gate clamped from above, up from both sides, and (up + 1) instead of up."""
    return _fused(partial(_clamped_swiglu, alpha=alpha, limit=limit))


def _fused(function: Gated) -> Gated:
    """One kernel instead of several, where that is free: the CPU backend would call a compiler."""
    return mx.compile(function, shapeless=True) if mx.metal.is_available() else function
