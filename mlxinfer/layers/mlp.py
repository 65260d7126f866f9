"""The dense feed-forward block and its gated activations.

Activations take gate and up projections that lie side by side, and are built on y * sigmoid(z):
SiLU as it is, and the tanh form of GELU because 0.5 (1 + tanh(z)) = sigmoid(2 z).
"""

import math
from collections.abc import Callable, Collection
from typing import Protocol

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..metal_kernels.gate_up import (
    GELU_CUBIC,
    GELU_SLOPE,
    MAX_ROWS,
    Gate,
    GateUp,
    Product,
    compiled_product,
    gate_up,
    product_of,
)
from ..metal_kernels.gate_up import PLAIN as PLAIN_NUMBERS
from ..metal_kernels.variants import KernelUse, ModelForm, ReadyFor, never
from .linear import Projection, QuantizedLinear, matrix_of

Activation = Callable[[mx.array], mx.array]
"""Outputs of a projection (..., inner or 2 * inner) -> (..., inner)."""

_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GELU_ERF = ("gelu",)

ACTIVATIONS = (*_SILU, *_GELU_TANH, *_GELU_ERF)


class FeedForward(Protocol):
    """The second block of a layer: an MLP or a mixture of experts."""

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels that can do the work of its parts."""

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus `residual` where one is given."""


class MLP:
    """down(act(gate(x)) * up(x)), with gate and up fused into one matrix, or down(act(up(x))).

    In plain MLX the product and the activation are two operations. For a few rows, the kernel does
    both in one. An adapter that replaces the projection is no plain matrix, so it is called as it
    is.

    Attributes:
        ready: for how many rows the kernel may be used. Set by the engine.
    """

    __slots__ = ("activation", "down_proj", "form", "gate_up_proj", "ready")

    def __init__(
        self, gate_up_proj: Projection, down_proj: Projection, activation: Activation
    ) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation
        self.form = _form_of(gate_up_proj, activation)  # None: there is no such kernel
        self.ready: ReadyFor = never

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        form, ready = self.form, self.ready
        if form is not None and ready is not never and x.dtype == form.gate.dtype:
            matrix = matrix_of(self.gate_up_proj) if ready(x.shape[0]) else None
            if matrix is not None:
                return self.down_proj(gate_up(x, matrix, form), residual)
        return self.down_proj(self.activation(self.gate_up_proj(x)), residual)

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        form = self.form
        if form is None or form.gate.dtype != model.dtype:
            return []
        variants = {rows: [form.variant(rows)] for rows in range(1, MAX_ROWS + 1)}
        return [KernelUse(variants, self._install)]

    def _install(self, ready: ReadyFor) -> None:
        self.ready = ready


def _form_of(projection: Projection, activation: Activation) -> GateUp | None:
    matrix = matrix_of(projection)
    if matrix is None or not isinstance(activation, Gated) or activation.gate is None:
        return None
    codes, group_size = PLAIN_NUMBERS, 1
    if isinstance(projection, QuantizedLinear):
        codes, group_size = (projection.bits, projection.group_size), projection.group_size
    out_dims, num_groups = matrix[-1].shape
    sizes = num_groups * group_size, out_dims // 2
    form = GateUp(activation.gate, *sizes, *codes, matrix[-1].dtype)
    return form if form.has_kernel else None


class Gated:
    """[gate, up] (..., 2 * dims) -> act(gate) * up (..., dims).

    On Metal it is one operation, which MLX compiles.

    Args:
        gate: the same for the kernel of `MLP`; None: the kernel has no such function.
    """

    __slots__ = ("_product", "gate")

    def __init__(self, product: Product, gate: Gate | None = None) -> None:
        self._product = compiled_product(product)
        self.gate = gate

    def __call__(self, gate_up: mx.array) -> mx.array:
        """gate_up (..., 2 * dims) -> (..., dims)."""
        return self._product(*mx.split(gate_up, 2, axis=-1))


def relu_squared(x: mx.array) -> mx.array:
    """max(x, 0) squared, of blocks without a gate (arXiv 2109.08668)."""
    return mx.square(mx.maximum(x, 0.0))


def softplus(x: mx.array) -> mx.array:
    """log(1 + exp(x)), computed in float32."""
    return mx.logaddexp(x.astype(mx.float32), 0.0).astype(x.dtype)


def gated(name: str, dtype: mx.Dtype) -> Gated:
    """The activation that a config's hidden_act names; raises UnsupportedModelError."""
    _check(name, ACTIVATIONS)
    if name in _GELU_ERF:
        return Gated(lambda gate, up: gelu_of(mx.erf)(gate) * up)
    if name in _SILU:
        return _with_kernel(Gate("silu", dtype))
    return _with_kernel(Gate("gelu_tanh", dtype))


def clamped_swiglu(dtype: mx.Dtype, *, alpha: float, limit: float) -> Gated:
    """gpt-oss: the gate clamped from above, up from both sides, and (up + 1) instead of up."""
    return _with_kernel(Gate("clamped_swiglu", dtype, float(alpha), float(limit)))


def clipped_swiglu(dtype: mx.Dtype, *, limit: float) -> Gated:
    """GLM 5.3 Flash, DeepSeek V4: the gate clamped from above before its SiLU, up on both sides."""
    return _with_kernel(Gate("clipped_swiglu", dtype, limit=float(limit)))


def limited_swiglu(limit: float) -> Gated:
    """Step 3.5 and Ling 3.0: silu(gate) limited from above, up from both sides."""

    def product(gate: mx.array, up: mx.array) -> mx.array:
        return mx.minimum(gate * mx.sigmoid(gate), limit) * mx.clip(up, -limit, limit)

    return Gated(product)


def _with_kernel(gate: Gate) -> Gated:
    return Gated(product_of(gate), gate)


def gelu_of(erf: Activation) -> Activation:
    """GELU (arXiv 1606.08415) by a form of the error function."""
    return lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x * (GELU_SLOPE + GELU_SLOPE * GELU_CUBIC * mx.square(x)))


PLAIN: dict[str, Activation] = {
    **dict.fromkeys(_GELU_ERF, gelu_of(mx.erf)),
    **dict.fromkeys(_GELU_TANH, _gelu_tanh),
    **dict.fromkeys(_SILU, lambda x: x * mx.sigmoid(x)),
    "quick_gelu": lambda x: x * mx.sigmoid(1.702 * x),
    "relu": lambda x: mx.maximum(x, 0.0),
    "tanh": mx.tanh,
}


def plain(name: str) -> Activation:
    """As `gated`, of a block without a gate, or of a projector."""
    _check(name, PLAIN)
    return PLAIN[name]


def _check(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise UnsupportedModelError(
            f"The activation is {name[:60]!r}; supported are {', '.join(known)}."
        )
