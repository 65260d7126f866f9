"""The kernel of gated activations, executed on the CPU: against its twin and the layers."""

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.layers import mlp
from mlxinfer.metal_kernels.gated import FUNCTIONS, Gate, gate_of, gated, gated_twin
from mlxinfer.metal_kernels.launch import running_on

ROUNDING = {mx.float32: 2e-6, mx.float16: 2**-10, mx.bfloat16: 2**-7}
LAYERS = {
    "silu": mlp.gated("silu", mx.float32),
    "gelu_tanh": mlp.gated("gelu_pytorch_tanh", mx.float32),
    "clamped_swiglu": mlp.clamped_swiglu(mx.float32, alpha=1.702, limit=2.0),
}


def gate_for(function: str, dtype: mx.Dtype) -> Gate:
    return gate_of(function, dtype, *((1.702, 2.0) if function == "clamped_swiglu" else ()))


def gate_up(*shape: int) -> mx.array:
    """Numbers that reach every clamp, and where exp overflows."""
    rng = np.random.default_rng(shape[-1])
    numbers = rng.uniform(-5, 5, shape).astype(np.float32)
    numbers.reshape(-1)[:4] = [0, -200, 200, -88]
    return mx.array(numbers)


def on_machine(x: mx.array, gate: Gate) -> mx.array:
    machine = MetalCPU(seed=1)
    with running_on(machine):
        found = gated(x, gate)
    machine.assert_clean()
    return found


def close(found: mx.array, expected: mx.array, rounding: float) -> bool:
    wide = [np.array(a.astype(mx.float32)) for a in (found, expected)]
    return np.allclose(*wide, rtol=rounding, atol=1e-6)


@requires_compiler
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 512), mx.bfloat16), ((3, 2, 1, 70), mx.float16), ((5, 8), mx.float32)],
)
def test_agrees_with_its_twin(function: str, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    x = gate_up(*shape).astype(dtype)
    gate = gate_for(function, dtype)
    found, expected = (f(x, gate) for f in (on_machine, gated_twin))
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert close(found, expected, ROUNDING[dtype])


@requires_compiler
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_layer_gives_the_same_with_its_kernel(function: str) -> None:
    layer, gate = LAYERS[function], gate_for(function, mx.float32)
    assert layer.gate is gate
    x = gate_up(4, 66)
    expected = layer(x)
    assert close(gated_twin(x, gate), expected, 2e-6)
    assert close(on_machine(x, gate), expected, 2e-6)


def test_what_has_no_kernel_is_left_as_it_is() -> None:
    assert mlp.gated("gelu", mx.float32).gate is None


def test_the_same_values_are_the_same_object() -> None:
    """Layers and the self-check look up launches by it, however they wrote it."""
    assert gate_of("silu", mx.float16) is gate_of("silu", mx.float16, limit=0.0, alpha=0.0)
    assert gate_of("silu", mx.float16) is not gate_of("silu", mx.bfloat16)
