"""The dense feed-forward block and its gated activations.

Activations take gate and up projections that lie side by side, and are built on y * sigmoid(z):
SiLU as it is, and the tanh form of GELU because 0.5 (1 + tanh(z)) = sigmoid(2 z).
"""

import math
from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from ..metal_kernels.gate_up import PLAIN as PLAIN_NUMBERS
from ..metal_kernels.gate_up import GateUp, gate_up_of
from ..metal_kernels.gate_up import gate_up as gate_up_in_kernel
from ..metal_kernels.gated import GELU_CUBIC, GELU_SLOPE, Gate, Product, gate_of, in_mlx, product_of
from ..metal_kernels.gated import gated as gated_in_kernel
from ..metal_kernels.variants import ReadyFor, never
from .linear import Projection, QuantizedLinear, matrix_of

Activation = Callable[[mx.array], mx.array]
"""Of what a projection gives, (..., inner or 2 * inner) -> (..., inner)."""

_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GELU_ERF = ("gelu",)

ACTIVATIONS = (*_SILU, *_GELU_TANH, *_GELU_ERF)


class FeedForward(Protocol):
    """The second block of a layer: an MLP or a mixture of experts."""

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus `residual` where one is given."""
        ...


class MLP:
    """down(act(gate(x)) * up(x)), with gate and up fused into one matrix, or down(act(up(x))).

    In plain MLX the product is one operation and the activation another. Where the engine chose the
    kernel, they are one for a few rows. An adapter that takes the projection's place is no plain
    matrix, and is used as it is.

    Attributes:
        form: what a kernel would do with the projection that was given; None: none does the like.
        in_kernel: what the kernel does; None: it is not used. Set by the engine.
        ready: for how many rows it may be used. Set by the engine.
    """

    __slots__ = ("activation", "down_proj", "form", "gate_up_proj", "in_kernel", "ready")

    def __init__(
        self, gate_up_proj: Projection, down_proj: Projection, activation: Activation
    ) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation
        self.form = _form_of(gate_up_proj, activation)
        self.in_kernel: GateUp | None = None
        self.ready: ReadyFor = never

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        folded = None if self.in_kernel is None else self._in_kernel(x, self.in_kernel)
        if folded is None:
            folded = self.activation(self.gate_up_proj(x))
        return self.down_proj(folded, residual)

    def _in_kernel(self, x: mx.array, form: GateUp) -> mx.array | None:
        """x (T, hidden) -> act(gate(x)) * up(x) (T, inner); None: not for this x."""
        if x.dtype != form.gate.dtype or not self.ready(x.shape[0]):
            return None
        matrix = matrix_of(self.gate_up_proj)
        return None if matrix is None else gate_up_in_kernel(x, matrix, form)


def _form_of(projection: Projection, activation: Activation) -> GateUp | None:
    matrix = matrix_of(projection)
    if matrix is None or not isinstance(activation, Gated) or activation.gate is None:
        return None
    codes, group_size = PLAIN_NUMBERS, 1
    if isinstance(projection, QuantizedLinear):
        codes, group_size = (projection.bits, projection.group_size), projection.group_size
    out_dims, num_groups = matrix[-1].shape
    sizes = num_groups * group_size, out_dims // 2
    return gate_up_of(activation.gate, *sizes, *codes, matrix[-1].dtype)


class Gated:
    """[gate, up] (..., 2 * dims) -> act(gate) * up (..., dims).

    One kernel where there is Metal: MLX's compiled function, or our own, where the engine chose it,
    which takes the host half as long.

    Args:
        product: of gate and up.
        gate: what our kernel makes of them; None: it has no such function.
        fused: as for `in_mlx`.
    """

    __slots__ = ("_product", "gate", "in_kernel")

    def __init__(
        self, product: Product, gate: Gate | None = None, *, fused: bool | None = None
    ) -> None:
        self._product = in_mlx(product, fused=fused)
        self.gate = gate
        self.in_kernel = False  # set by the engine

    def __call__(self, gate_up: mx.array) -> mx.array:
        """gate_up (..., 2 * dims) -> (..., dims)."""
        if self.in_kernel and self.gate is not None:
            return gated_in_kernel(gate_up, self.gate)
        return self._product(*mx.split(gate_up, 2, axis=-1))


def relu_squared(x: mx.array) -> mx.array:
    """max(x, 0) squared, of blocks without a gate (arXiv 2109.08668)."""
    return mx.square(mx.maximum(x, 0.0))


def gated(name: str, dtype: mx.Dtype) -> Gated:
    """The activation that a config's hidden_act names."""
    assert name in ACTIVATIONS, name
    if name in _GELU_ERF:
        return Gated(_geglu_erf)
    if name in _SILU:
        return _with_kernel(gate_of("silu", dtype))
    return _with_kernel(gate_of("gelu_tanh", dtype))


def clamped_swiglu(dtype: mx.Dtype, *, alpha: float, limit: float) -> Gated:
    """gpt-oss: the gate clamped from above, up from both sides, and (up + 1) instead of up."""
    return _with_kernel(gate_of("clamped_swiglu", dtype, float(alpha), float(limit)))


def _with_kernel(gate: Gate) -> Gated:
    return Gated(product_of(gate), gate)


def _geglu_erf(gate: mx.array, up: mx.array) -> mx.array:
    return gelu_of(mx.erf)(gate) * up


def gelu_of(erf: Activation) -> Activation:
    """GELU (arXiv 1606.08415) by a form of the error function."""
    return lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x * (GELU_SLOPE + GELU_SLOPE * GELU_CUBIC * mx.square(x)))


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0.0)


PLAIN: dict[str, Activation] = {
    **dict.fromkeys(_GELU_ERF, gelu_of(mx.erf)),
    **dict.fromkeys(_GELU_TANH, _gelu_tanh),
    **dict.fromkeys(_SILU, _silu),
    "relu": _relu,
    "tanh": mx.tanh,
}
