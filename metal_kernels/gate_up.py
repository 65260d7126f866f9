"""Gate and up of a few rows and their activation in one dispatch, and its plain-MLX twin.

Both are one matrix, rows of gate before those of up: in MLX's affine codes of 4 or 8 bits, or plain
numbers. A decode step otherwise writes both products, rounded, for a second kernel to read. Sums
are float32 and are rounded once, after the activation. Knows no layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import mlx.core as mx
import numpy as np

from .launch import Launch, MetalKernel
from .variants import IN_MLX, Case, Form, Kind, Variant, launch_of

LANES, SIMD_GROUPS, PAIRS, PART = 32, 2, 2, 8  # as in gate_up.metal
PER_THREADGROUP = SIMD_GROUPS * PAIRS  # numbers of an output row
PLAIN = (0, 0)
CODES = tuple((bits, group_size) for bits in (4, 8) for group_size in (32, 64, 128))
MAX_ROWS = 8  # of more, MLX's product of matrices reads the matrix less often
SHARING_ROWS = 4  # rows that share what is read; more would not leave registers for loads
ROUNDING = {"float32": 2e-4, "float16": 2**-5, "bfloat16": 2**-2}  # of numbers below 64
CASE_INNER = 12
MOST_TIMED_BYTES = 128 << 20  # of a matrix: more than caches hold, and little beside a model


@dataclass(frozen=True, slots=True, eq=False)
class Gate(Form):
    """A gated activation."""

    function: str  # one of FUNCTIONS
    dtype: mx.Dtype  # of the products and of the activation: float32, float16 or bfloat16
    alpha: float = 0.0  # of clamped_swiglu alone
    limit: float = 0.0  # of clamped_swiglu and clipped_swiglu

    @property
    def constructor(self) -> str:
        """The activation of `gates.h`, in Metal."""
        known = {"clamped_swiglu": (self.alpha, self.limit), "clipped_swiglu": (self.limit,)}
        numbers = ", ".join(f"{float(bound)!r}f" for bound in known.get(self.function, ()))
        return f"{FUNCTIONS[self.function]}{{{numbers}}}"


Product = Callable[[mx.array, mx.array], mx.array]
"""gate (..., dims), up (..., dims) -> (..., dims)."""

GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715

FUNCTIONS = {
    "silu": "Silu",
    "gelu_tanh": "GeluTanh",
    "clamped_swiglu": "ClampedSwiglu",
    "clipped_swiglu": "ClippedSwiglu",
}


@dataclass(frozen=True, slots=True, eq=False)
class GateUp(Form):
    """A matrix of gate and up, and the activation of the products.

    Attributes:
        gate: the activation, and the dtype of inputs and outputs.
        in_dims: numbers of an input row.
        inner: numbers of an output row; the matrix has twice as many rows.
        bits, group_size: of MLX's affine codes; 0: the matrix is of plain numbers.
        stored: dtype of scales and biases, or of the plain numbers: float32, float16 or bfloat16.
    """

    gate: Gate
    in_dims: int
    inner: int
    bits: int
    group_size: int
    stored: mx.Dtype

    @property
    def has_kernel(self) -> bool:
        if self.inner % PER_THREADGROUP or (self.bits, self.group_size) not in (PLAIN, *CODES):
            return False
        return self.in_dims % (self.group_size or PART) == 0

    def variant(self, num_rows: int) -> Variant:
        return Variant.from_form("gate_up", self, rows=most_rows(num_rows))

    def launch(self, shape: tuple[int, ...]) -> Launch:
        """The call for rows of a shape (T, in_dims)."""
        assert self.has_kernel, self
        num_rows, in_dims = shape
        assert in_dims == self.in_dims, (shape, self)
        assert 1 <= num_rows <= MAX_ROWS, shape
        rows, threads = _sharing(num_rows), SIMD_GROUPS * LANES
        return Launch(
            _kernel(self.gate, bool(self.bits)),
            template=[
                ("T", self.gate.dtype),
                ("S", self.stored),
                ("ROWS", rows),
                ("IN_DIMS", in_dims),
                ("BITS", self.bits),
                ("GROUP", self.group_size),
            ],
            grid=(-(-num_rows // rows) * threads, self.inner // PER_THREADGROUP, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(num_rows, self.inner)],
            output_dtypes=[self.gate.dtype],
        )


def gate_up(x: mx.array, matrix: Sequence[mx.array], form: GateUp) -> mx.array:
    """One dispatch.

    Args:
        x: (T, in_dims) of the gate's dtype, T at most MAX_ROWS.
        matrix: codes (2 * inner, in_dims * bits / 32) uint32 as `mx.quantize` packs them, scales
            and biases (2 * inner, in_dims / group_size); or numbers (2 * inner, in_dims) alone.

    Returns:
        (T, inner), act(gate x) * up x.
    """
    return launch_of(form, x.shape)([x, *matrix])[0]


def gate_up_twin(x: mx.array, matrix: Sequence[mx.array], form: GateUp) -> mx.array:
    wide = [a if a.dtype == mx.uint32 else a.astype(mx.float32) for a in (x, *matrix)]
    return gated_twin(product(wide[0], wide[1:], form), form.gate)


def product(x: mx.array, matrix: Sequence[mx.array], form: GateUp) -> mx.array:
    """x (T, in_dims), the matrix of `gate_up` -> (T, 2 * inner), by MLX."""
    if not form.bits:
        return x @ matrix[0].T
    weight, scales, biases = matrix
    return mx.quantized_matmul(x, weight, scales, biases, True, form.group_size, form.bits)


def gated_twin(gate_up: mx.array, gate: Gate) -> mx.array:
    x, up = mx.split(gate_up.astype(mx.float32), 2, axis=-1)
    return product_of(gate)(x, up).astype(gate.dtype)


def product_of(gate: Gate) -> Product:
    """Plain MLX, each operation rounded.

    Each is built on y * sigmoid(z): 0.5 (1 + tanh(z)) = sigmoid(2 z).
    """
    if gate.function == "silu":
        return _swiglu
    if gate.function == "gelu_tanh":
        return _geglu_tanh
    if gate.function == "clipped_swiglu":
        return partial(_clipped_swiglu, limit=gate.limit)
    return partial(_clamped_swiglu, alpha=gate.alpha, limit=gate.limit)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _geglu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    doubled = gate * (GELU_SLOPE + GELU_SLOPE * GELU_CUBIC * mx.square(gate))
    return gate * mx.sigmoid(doubled) * up


def _clipped_swiglu(gate: mx.array, up: mx.array, *, limit: float) -> mx.array:
    return _swiglu(mx.minimum(gate, limit), mx.clip(up, -limit, limit))


def _clamped_swiglu(gate: mx.array, up: mx.array, *, alpha: float, limit: float) -> mx.array:
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(alpha * gate) * (mx.clip(up, -limit, limit) + 1)


def compiled_product(product: Product) -> Product:
    """The product as one operation on Metal; on the CPU MLX would call a C compiler for it.

    Gate and up are split before it: a split has no rule for shapes that are left open.
    """
    return mx.compile(product, shapeless=True) if mx.metal.is_available() else product


def most_rows(num_rows: int) -> int:
    """The rows of the variant that serves `num_rows`: 1, 2, 4 or 8."""
    return 1 << (num_rows - 1).bit_length()


def _sharing(num_rows: int) -> int:
    return min(most_rows(num_rows), SHARING_ROWS)


@cache
def _kernel(gate: Gate, has_codes: bool) -> MetalKernel:
    arrays = ("weight", "scales", "biases") if has_codes else ("weight",)
    kind = "Codes<BITS, GROUP, IN_DIMS, S>" if has_codes else "Numbers<IN_DIMS, S>"
    return MetalKernel(
        name="gate_up",
        inputs=("x", *arrays),
        outputs=("outputs",),
        body=f"""
            const {kind} matrix{{{", ".join(arrays)}}};
            gate_up<ROWS>({gate.constructor}, x, matrix, outputs, x_shape[0],
                          weight_shape[0] / 2, threadgroup_position_in_grid.xy,
                          simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
        """,
        includes=("gates.h",),
    )


def _inputs(form: GateUp, rows: int) -> tuple[mx.array, list[mx.array]]:
    """x (rows, in_dims) and a matrix of the form; every code occurs.

    Products are of some 4. Scales are of either sign.
    """
    inner = form.inner
    in_dims, bits, group_size = form.in_dims, form.bits, form.group_size
    rng = np.random.default_rng(rows)
    numbers = rng.normal(0, 2, (rows, in_dims)).astype(np.float32)
    numbers[0, 0] = 0
    x = mx.array(numbers).astype(form.gate.dtype)
    size = 1 / math.sqrt(in_dims)
    if not bits:
        shape, key = (2 * inner, in_dims), mx.random.key(rows)
        return x, [mx.random.normal(shape, form.stored, 0, size, key)]
    groups = 2 * inner, in_dims // group_size
    scales = 4 * size / 2**bits * rng.choice([-1, 1], groups)
    biases = -(2 ** (bits - 1)) * scales + size * rng.normal(size=groups)
    words = rng.integers(0, 2**32, (2 * inner, in_dims * bits // 32), np.uint32)
    return x, [mx.array(words), *(mx.array(a).astype(form.stored) for a in (scales, biases))]


def _case(variant: Variant) -> Case:
    form, rows = replace(variant.form, inner=CASE_INNER), variant.number("rows")
    x, matrix = _inputs(form, rows - (rows > 2))  # one is missing
    return Case(
        lambda: [gate_up(x, matrix, form)],
        lambda: [gate_up_twin(x, matrix, form)],
        (ROUNDING[str(variant["dtype"])],),
    )


def _timed(variant: Variant, _: int, __: int) -> Case:
    form = replace(variant.form, inner=timed_inner(variant.form))
    x, matrix = _inputs(form, variant.number("rows"))
    activation = compiled_product(product_of(form.gate))
    return Case(
        lambda: [gate_up(x, matrix, form)],
        lambda: [gate_up_twin(x, matrix, form)],
        (ROUNDING[str(variant["dtype"])],),
        instead={IN_MLX: lambda: [activation(*mx.split(product(x, matrix, form), 2, axis=-1))]},
    )


def timed_inner(form: GateUp) -> int:
    """Numbers of an output row when a form is timed: its own, or fewer for large matrices.

    From there on both ways read the matrix at the speed of memory, so their ratio does not change.
    """
    bits = form.bits or 8 * form.stored.size
    most = MOST_TIMED_BYTES * 8 // (2 * form.in_dims * bits)
    return min(form.inner, most // PER_THREADGROUP * PER_THREADGROUP)


def _registers(variant: Variant) -> int:
    """32-bit registers of a lane: see gate_up.metal."""
    form, rows = variant.form, _sharing(variant.number("rows"))
    run = form.bits // 2 + 2 if form.bits else PART * form.stored.size // 4
    decoded = PART * (2 * PAIRS if rows > 1 else 1)
    return decoded + 2 * PAIRS * run + rows * (2 * PAIRS + 1) + PART + 12


def _sample(gate: Gate, codes: tuple[int, int], rows: int, stored: mx.Dtype) -> Variant:
    return GateUp(gate, 768, 64, *codes, stored).variant(rows)


_SILU, _BF16 = Gate("silu", mx.bfloat16), mx.bfloat16
GATE_UP = Kind(
    name="gate_up",
    files=("gate_up.metal", "gates.h", "gate_up.py"),
    case=_case,
    timed=_timed,
    loads=((1, 0),),  # of as many rows as a variant serves
    registers=_registers,
    samples=(
        _sample(_SILU, (4, 64), 1, _BF16),
        _sample(Gate("gelu_tanh", mx.float16), (8, 32), 8, mx.float16),
        _sample(_SILU, PLAIN, 2, _BF16),
        _sample(Gate("clamped_swiglu", _BF16, 1.702, 7.0), (4, 128), 2, _BF16),
        _sample(_SILU, (8, 64), 4, mx.float32),
    ),
)
