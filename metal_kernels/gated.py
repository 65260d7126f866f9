"""Gated activations in one dispatch, and their plain-MLX twin. Knows no weights and no layer.

Computed in float32 and rounded once, where operations one by one would round after each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import mlx.core as mx
import numpy as np

from .launch import Launch, MetalKernel
from .variants import Case, Kind, Variant, dtype_name

THREADS = 256
MAX_LAUNCHES = 64  # that are remembered: a decode step makes the same in every layer
ROUNDING = {"float32": 2e-5, "float16": 2**-6, "bfloat16": 2**-3}  # of numbers below 32
CASE_ROWS, CASE_DIMS, TIMED_DIMS = 3, 300, 12_288


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """What is done to gate and up.

    From `gate_of`: layers look up launches by the object.

    Attributes:
        function: one of FUNCTIONS.
        dtype: of gate, up and what comes of them: float32, float16 or bfloat16.
        alpha, limit: of clamped_swiglu alone.
    """

    function: str
    dtype: mx.Dtype
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def constructor(self) -> str:
        """The activation of `gates.h`, in Metal."""
        clamped = self.function == "clamped_swiglu"
        numbers = f"{self.alpha!r}f, {self.limit!r}f" if clamped else ""
        return f"{FUNCTIONS[self.function]}{{{numbers}}}"

    @property
    def values(self) -> dict[str, str]:
        """What a variant has of it; `gate_from` is the way back."""
        return {
            "dtype": dtype_name(self.dtype),
            "function": self.function,
            "alpha": repr(self.alpha) if self.alpha else "",
            "limit": repr(self.limit) if self.limit else "",
        }


Product = Callable[[mx.array, mx.array], mx.array]
"""gate (..., dims), up (..., dims) -> (..., dims)."""

GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715

FUNCTIONS = {"silu": "Silu", "gelu_tanh": "GeluTanh", "clamped_swiglu": "ClampedSwiglu"}
_gate = cache(Gate)


def gate_of(function: str, dtype: mx.Dtype, alpha: float = 0.0, limit: float = 0.0) -> Gate:
    """The same object for the same values."""
    return _gate(function, dtype, alpha, limit)


def gated(gate_up: mx.array, gate: Gate) -> mx.array:
    """gate_up (..., 2 * dims), gate and then up, -> (..., dims). One dispatch."""
    return _launch(gate, gate_up.shape)([gate_up])[0]


def gated_twin(gate_up: mx.array, gate: Gate) -> mx.array:
    """The same in plain MLX."""
    x, up = mx.split(gate_up.astype(mx.float32), 2, axis=-1)
    if gate.function == "silu":
        y = x * mx.sigmoid(x) * up
    elif gate.function == "gelu_tanh":
        y = x * mx.sigmoid(GELU_SLOPE * x * (1 + GELU_CUBIC * x * x)) * up
    else:
        x = mx.minimum(x, gate.limit)
        y = x * mx.sigmoid(gate.alpha * x) * (mx.clip(up, -gate.limit, gate.limit) + 1)
    return y.astype(gate.dtype)


def in_mlx(product: Product, *, fused: bool | None = None) -> Product:
    """The product as layers compute it without the kernel.

    Gate and up are split before it: a split has no rule for shapes that are left open.

    Args:
        product: of gate and up.
        fused: compile the product; None: where there is Metal. On the CPU, MLX would call a
            compiler.
    """
    fused = mx.metal.is_available() if fused is None else fused
    return mx.compile(product, shapeless=True) if fused else product


def product_of(gate: Gate) -> Product:
    """Plain MLX, each operation rounded.

    Each is built on y * sigmoid(z): 0.5 (1 + tanh(z)) = sigmoid(2 z).
    """
    if gate.function == "silu":
        return _swiglu
    if gate.function == "gelu_tanh":
        return _geglu_tanh
    return partial(_clamped_swiglu, alpha=gate.alpha, limit=gate.limit)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _geglu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    doubled = gate * (GELU_SLOPE + GELU_SLOPE * GELU_CUBIC * mx.square(gate))
    return gate * mx.sigmoid(doubled) * up


def _clamped_swiglu(gate: mx.array, up: mx.array, *, alpha: float, limit: float) -> mx.array:
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(alpha * gate) * (mx.clip(up, -limit, limit) + 1)


@lru_cache(MAX_LAUNCHES)
def _launch(gate: Gate, shape: tuple[int, ...]) -> Launch:
    *rows, width = shape
    dims = width // 2
    assert width == 2 * dims, shape
    return Launch(
        _kernel(gate),
        template=[("T", gate.dtype)],
        grid=(dims, math.prod(rows), 1),
        threadgroup=(min(THREADS, dims), 1, 1),
        output_shapes=[(*rows, dims)],
        output_dtypes=[gate.dtype],
    )


@cache
def _kernel(gate: Gate) -> MetalKernel:
    return MetalKernel(
        name="gated",
        inputs=("gate_up",),
        outputs=("outputs",),
        body=f"""
            gated<T>({gate.constructor}, gate_up, outputs,
                     thread_position_in_grid.xy, threads_per_grid.x);
        """,
        includes=("gates.h",),
    )


def gated_variant(gate: Gate) -> Variant:
    """What `gated` compiles."""
    return Variant.of("gated", **gate.values)


def gate_from(variant: Variant) -> Gate:
    """The activation of a variant."""
    numbers = [float(str(variant[name]) or 0) for name in ("alpha", "limit")]
    return gate_of(str(variant["function"]), variant.dtype, *numbers)


def _case(variant: Variant) -> Case:
    gate, inputs = _inputs(variant, CASE_ROWS, CASE_DIMS)
    return Case(
        lambda: [gated(inputs, gate)],
        lambda: [gated_twin(inputs, gate)],
        (ROUNDING[str(variant["dtype"])],),
    )


def _timed(variant: Variant, sequences: int, _: int) -> Case:
    """Beside the product that layers compile."""
    gate, inputs = _inputs(variant, sequences, TIMED_DIMS)
    plain = in_mlx(product_of(gate))
    return Case(lambda: [gated(inputs, gate)], lambda: [plain(*mx.split(inputs, 2, axis=-1))], ())


def _inputs(variant: Variant, rows: int, dims: int) -> tuple[Gate, mx.array]:
    rng = np.random.default_rng(dims)
    gate_up = rng.uniform(-5, 5, (rows, 2 * dims)).astype(np.float32)
    gate_up[0, :3] = [0, -200, -88]  # where exp overflows, and where it nearly does
    return gate_from(variant), mx.array(gate_up).astype(variant.dtype)


GATED = Kind(
    name="gated",
    files=("gated.metal", "gates.h", "gated.py"),
    case=_case,
    timed=_timed,
    registers=lambda variant: 12,
    samples=(
        gated_variant(gate_of("silu", mx.bfloat16)),
        gated_variant(gate_of("clamped_swiglu", mx.float16, 1.702, 7.0)),
        gated_variant(gate_of("gelu_tanh", mx.bfloat16)),
    ),
)
