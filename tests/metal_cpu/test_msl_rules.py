"""Edits that Metal rejects, or that are unsafe there, are found in a kernel without running it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest
from models.runs import every

from metal_cpu import MetalCPU, build, requires_compiler
from metal_cpu.address_spaces import refused
from metal_cpu.capture import UTILITIES, capture
from metal_cpu.examples import Example
from metal_cpu.lint import lint
from metal_cpu.mlx_kernels import FOLDER
from metal_cpu.msl_references import reference_faults
from metal_cpu.msl_rules import faults
from metal_cpu.program import program
from metal_cpu.source import Kernel, Part, flattened
from tests.tables import table

TABLES: Any = table(__file__, "msl_rules.yml")

pytestmark = requires_compiler

SOUND = """
constant constexpr uint WIDTH = 8;
struct Pair { float a; float b; };
METAL_FUNC float doubled(thread float& x) { x = x * 2.0f; return x; }
METAL_FUNC float total(const device float* p, uint n) {
  float sum = 0;
  for (uint i = 0; i < n; i++) sum += p[i];
  return sum;
}
//HELPERS
[[kernel]] void k(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  uint3 place [[thread_position_in_grid]]) {
  uint i = place.x;
  threadgroup float mine[WIDTH];
  mine[i % WIDTH] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float v = mine[i % WIDTH];
  y[i] = doubled(v) + total(x, 4);
  //BODY
}
"""


@dataclass(frozen=True)
class Edit:
    """What is put into the sound kernel: helpers before it, statements at its end, or instead."""

    name: str
    helpers: str = ""
    body: str = ""
    old: str = ""
    new: str = ""


EDITS = [Edit(name, **fields) for name, fields in TABLES["edits"].items()]


def kernel_with(edit: Edit) -> Kernel:
    text = SOUND.replace("//HELPERS", edit.helpers).replace("//BODY", edit.body)
    if edit.old:
        assert edit.old in text
        text = text.replace(edit.old, edit.new)
    return Kernel("k", (UTILITIES, Part("edited.metal", text)))


def test_the_sound_kernel_has_no_fault() -> None:
    kernel = kernel_with(Edit("none"))
    program(kernel, checked=False)
    assert not lint(kernel)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_what_metal_rejects_is_found_without_a_run(edit: Edit) -> None:
    result = [fault for fault in lint(kernel_with(edit)) if fault.file == "edited.metal"]
    assert result, build.cache_folder()


def test_errors_in_functions_that_are_instantiated_are_found() -> None:
    """In a template only what a kernel uses has address spaces that can be checked."""
    example = Example(
        text="template <typename P>\nMETAL_FUNC float first(P p) {\n"
        "const threadgroup float* q = p; return q[0]; }",
        body="out[thread_position_in_grid.x] = first(x);",
        inputs={"x": mx.zeros((9,))},
        grid=(1, 1, 1),
    )
    kernel = capture(example.launch(), list(example.inputs.values())).kernel
    assert [fault.line for fault in lint(kernel)] == [3]
    staged = "threadgroup float s[1]; s[0] = x[0]; out[thread_position_in_grid.x] = first(s);"
    example.run(machine := MetalCPU(replace={example.body: staged}))
    machine.assert_clean()


def kernel_of_mlx(headers: Sequence[str], function: str, instance: str) -> Kernel:
    text = "".join(f'#include "{FOLDER}/{header}"\n' for header in headers)
    return Kernel(function, (UTILITIES, Part("mlx", text)), instance)


SDPA = ("sdpa_vector.h",)
KERNELS_OF_MLX = [
    (SDPA, "sdpa_vector", "half, 128, 128"),
    (SDPA, "sdpa_vector_2pass_1", "bfloat16_t, 64, 64"),
    (SDPA, "sdpa_vector_2pass_2", "float, 128"),
]
STEEL_ATTENTION = ("steel/attn/kernels/steel_attention.h",)
GEMM = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h")
SPLIT_GEMM = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_splitk.h")
QUANTISED = ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
LARGE_KERNELS_OF_MLX = [
    (STEEL_ATTENTION, "attention", "half, 32, 16, 128, 128, 4, 1"),
    (GEMM, "gemm", "bfloat16_t, 64, 64, 16, 2, 2, false, true, float"),
    (QUANTISED, "affine_qmm_t", "half, 64, 4, true, false"),
    (QUANTISED, "affine_qmv_fast", "half, 64, 4, false"),
    (STEEL_ATTENTION, "attention", "bfloat16_t, 32, 32, 64, 64, 4, 1"),
    (GEMM, "gemm", "half, 32, 32, 16, 2, 2, true, false, float"),
    (SPLIT_GEMM, "gemm_splitk", "half, float, 32, 32, 16, 2, 2, false, true, true, true"),
    (QUANTISED, "affine_qmm_n", "bfloat16_t, 32, 8, false"),
    (QUANTISED, "affine_qmv", "float, 128, 6, false"),
    (QUANTISED, "affine_qvm", "half, 64, 3, false"),
    (QUANTISED, "affine_gather_qmm_rhs", "half, 64, 4, 16, 32, 32, 1, 2, true"),
]


@pytest.mark.parametrize(("headers", "function", "instance"), KERNELS_OF_MLX)
def test_kernels_of_mlx_pass(headers: Sequence[str], function: str, instance: str) -> None:
    assert not lint(kernel_of_mlx(headers, function, instance))


@pytest.mark.parametrize(("headers", "function", "instance"), every(4, LARGE_KERNELS_OF_MLX))
def test_large_kernels_are_sound(headers: Sequence[str], function: str, instance: str) -> None:
    """They are C++17, which `lint` refuses."""
    assert not refused(kernel_of_mlx(headers, function, instance))


def test_a_kernel_of_mlx_with_a_fault_does_not_pass() -> None:
    kernel = kernel_of_mlx(*LARGE_KERNELS_OF_MLX[0])
    text = flattened(kernel.parts[1:], behind=(UTILITIES,))
    sound = "threadgroup T* Ks = KV_smem;"
    assert sound in text
    faulty = Part("mlx", text.replace(sound, "device T* Ks = KV_smem;"))
    assert refused(replace(kernel, parts=(UTILITIES, faulty)))


SOUND_TEXTS = [
    "METAL_FUNC float h(float a, float b) { float c = 1; c = a * b; return c & 1; }",
    "struct S { const device float* p; float at(int i) const thread { return p[i]; } };",
    "template <typename T, int N> struct V { T t[N]; }; constant constexpr int K = 3;",
    "enum Mode : int { A, B }; using F = float; typedef int I;",
    "METAL_FUNC float h(thread float (&a)[4], int i) { return a[i] * a[0]; }",
    "METAL_FUNC void h(threadgroup float* t) { if (t[0] > 0) { t[1] = 0; } return; }",
    "METAL_FUNC void h() { simdgroup_barrier(mem_flags::mem_none); return; }",
    "typedef simdgroup_matrix<float, 8, 8> M; METAL_FUNC void h(thread M& m, thread float2& x) {\n"
    "m.thread_elements()[1] *= 2; reinterpret_cast<thread float2&>(m.thread_elements()) = x; }",
    "struct B { float a; static float of(float x) { return x; } B(float x) : a(x) {} };",
]

SOUND_TEXTS += ["METAL_FUNC float h(int a, bfloat b) { return float(a * b); }"]

SOUND_REFERENCES = [
    "struct P { float a; }; METAL_FUNC float h(const thread P& p) { return p.a; }\n"
    "METAL_FUNC float g(thread P (&all)[2]) { P p = all[0]; return h(p) + h(all[1]); }",
    "METAL_FUNC float h(thread float& x) { return x; }\n"
    "METAL_FUNC float g(thread float* x) { float y[2]; return h(*x) + h(y[1]) + h((y[0])); }",
    "METAL_FUNC float h(thread float& x, int n) { return x; } METAL_FUNC float h(float x) {\n"
    "return x; } METAL_FUNC float g(float a) { return h(a + 1) < h(a, 2 * 3) ? 1.0f : h(2.0f); }",
]


@pytest.mark.parametrize("text", [*SOUND_TEXTS, *SOUND_REFERENCES])
def test_what_metal_takes_is_no_fault(text: str) -> None:
    parts = (Part("sound.metal", text),)
    assert not faults(parts)
    assert not reference_faults(parts)
