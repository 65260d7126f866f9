"""What Metal's compiler would refuse, and C++ alone would take, is a fault."""

from dataclasses import replace

import mlx.core as mx
import pytest

from metal_cpu import MetalCPU, requires_compiler
from metal_cpu.capture import UTILITIES, capture
from metal_cpu.examples import TURNED
from metal_cpu.inline import Example
from metal_cpu.lint import lint
from metal_cpu.mlx_calls import FOLDER
from metal_cpu.source import Kernel, Part

pytestmark = requires_compiler

CHANGES = {
    "a device pointer for threadgroup memory": (
        "mine[lane] = own;",
        "mine = (x); mine[lane] = own;",
    ),
    "a pointer without an address space": ("threadgroup half4* mine", "half4* mine"),
    "a reference without an address space": (
        "half4 own = *(const device half4*)(x + 4 * position);",
        "thread const half4& own = *(const device half4*)(x + 4 * position);",
    ),
    "a cast that loses the address space": ("(const device half4*)(x", "(const half4*)(x"),
    "an unnamed address space in a template": ("4 * position);", "4 * position); (int*)shifts;"),
    "a store to a constant": ("int factor =", "x[0] = half(0); int factor ="),
    "a float that becomes a bfloat": ("float next", "bfloat small = four.values[0]; float next"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_address_spaces_are_kept(name: str) -> None:
    old, new = CHANGES[name]
    assert old in TURNED.text
    kernel = kernel_of(replace(TURNED, text=TURNED.text.replace(old, new)))
    faults = lint(kernel)
    line = next(n for n, row in enumerate(TURNED.text.splitlines(), 1) if old[:20] in row)
    assert ("address space", "example.metal", line) in [(f.kind, f.file, f.line) for f in faults]


def kernel_of(example: Example) -> Kernel:
    return capture(example.launch(), list(example.inputs.values())).kernel


def test_sound_kernels_pass() -> None:
    assert not lint(kernel_of(TURNED))


def test_errors_in_functions_that_are_instantiated_are_found() -> None:
    """In a template only what a kernel uses has address spaces that can be checked."""
    text = """
template <typename P>
METAL_FUNC float first(P p) { const threadgroup float* q = p; return q[0]; }
"""
    example = Example(
        text=text,
        body="out[thread_position_in_grid.x] = first(x);",
        inputs={"x": mx.zeros((9,))},
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shape=(1,),
    )
    assert [fault.line for fault in lint(kernel_of(example))] == [3]
    staged = "threadgroup float s[1]; s[0] = x[0]; out[thread_position_in_grid.x] = first(s);"
    example.run(machine := MetalCPU(replace={example.body: staged}))
    machine.assert_clean()


@pytest.mark.parametrize(
    ("function", "instance", "constants"),
    [
        ("sdpa_vector", "half, 128, 128", ()),
        ("sdpa_vector_2pass_1", "bfloat16_t, 64, 64", ((26, 32),)),
        ("sdpa_vector_2pass_2", "float, 128", ()),
    ],
)
def test_kernels_of_mlx_pass(
    function: str, instance: str, constants: tuple[tuple[int, int], ...]
) -> None:
    text = f'#include "{FOLDER}/sdpa_vector.h"\n'
    assert not lint(Kernel(function, (UTILITIES, Part("sdpa", text)), instance, constants))
