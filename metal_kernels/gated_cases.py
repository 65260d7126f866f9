"""Self-check of the gated activations: inputs and tolerances. Knows no GPU."""

import mlx.core as mx
import numpy as np

from .gated import Gate, gate_of, gated, gated_twin
from .variants import Case, Kind, Variant, dtype_name

ROUNDING = {"float32": 2e-5, "float16": 2**-6, "bfloat16": 2**-3}  # of numbers below 32
ROWS, DIMS = 3, 300
TIMED_DIMS = 12_288


def gated_variant(gate: Gate) -> Variant:
    """What `gated` compiles."""
    return Variant.of(
        "gated",
        dtype=dtype_name(gate.dtype),
        function=gate.function,
        alpha=repr(gate.alpha) if gate.alpha else "",
        limit=repr(gate.limit) if gate.limit else "",
    )


def _case(variant: Variant) -> Case:
    return _gating(variant, ROWS, DIMS)


def _timed(variant: Variant, sequences: int, _: int) -> Case:
    return _gating(variant, sequences, TIMED_DIMS)


def _gating(variant: Variant, rows: int, dims: int) -> Case:
    numbers = [float(str(variant[name]) or 0) for name in ("alpha", "limit")]
    gate = gate_of(str(variant["function"]), variant.dtype, *numbers)
    rng = np.random.default_rng(dims)
    gate_up = rng.uniform(-5, 5, (rows, 2 * dims)).astype(np.float32)
    gate_up[0, :3] = [0, -200, -88]  # where exp overflows, and where it nearly does
    inputs = mx.array(gate_up).astype(variant.dtype)
    return Case(
        lambda: [gated(inputs, gate)],
        lambda: [gated_twin(inputs, gate)],
        (ROUNDING[str(variant["dtype"])],),
    )


GATED = Kind(
    name="gated",
    files=("gated.metal", "gated.py"),
    case=_case,
    timed=_timed,
    samples=(
        gated_variant(gate_of("silu", mx.bfloat16)),
        gated_variant(gate_of("clamped_swiglu", mx.float16, 1.702, 7.0)),
        gated_variant(gate_of("gelu_tanh", mx.bfloat16)),
    ),
)
