"""Edits that Metal rejects, or that are unsafe there, are found in a kernel without running it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


FRAGMENT = "simdgroup_matrix<float, 8, 8> m(0.0f);"


@dataclass(frozen=True)
class Edit:
    """What is put into the sound kernel: helpers before it, statements at its end, or instead."""

    name: str
    helpers: str = ""
    body: str = ""
    old: str = ""
    new: str = ""


EDITS = [
    Edit("constexpr object outside constant", "constexpr uint OTHER = 3;", "y[i] += OTHER;"),
    Edit("mutable object of the program", "float counter;", "y[i] += counter;"),
    Edit("static local", body="static float z = 0; y[i] += z;"),
    Edit(
        "threadgroup array in a helper",
        "METAL_FUNC float h(uint i) { threadgroup float t[4]; t[i % 4] = 1.0f; return t[0]; }",
        "y[i] += h(i);",
    ),
    Edit("bare reference", "METAL_FUNC void h(float& a) { a += 1.0f; }", "h(v); y[i] += v;"),
    Edit("bare pointer", "METAL_FUNC void h(float* a) { *a += 1.0f; }", "h(&v); y[i] += v;"),
    Edit("bare local pointer", body="float* q = &v; y[i] += *q;"),
    Edit(
        "device pointer as a thread's",
        "METAL_FUNC float h(thread const float* a) { return *a; }",
        "y[i] += h(x);",
    ),
    Edit("structured binding", body="Pair p = {1, 2}; auto [a, b] = p; y[i] += a + b;"),
    Edit("inline variable", "inline constexpr constant float K = 2.0f;", "y[i] += K;"),
    Edit(
        "fold expression",
        "template <typename... A> METAL_FUNC float sum(A... a) { return (a + ...); }",
        "y[i] += sum(1.0f, 2.0f);",
    ),
    Edit("if with initialiser", body="if (float q = v; q > 0) y[i] += q;"),
    Edit(
        "template <auto>", "template <auto N> METAL_FUNC float n() { return N; }", "y[i] += n<3>();"
    ),
    Edit(
        "deduced class template",
        "template <typename T> struct Box { T t; Box(T a) : t(a) {} };",
        "Box b(1.0f); y[i] += b.t;",
    ),
    Edit("lambda", body="auto f = [](auto a) { return a + 1.0f; }; y[i] += f(v);"),
    Edit("designated initialiser", body="Pair p = {.a = 1, .b = 2}; y[i] += p.a;"),
    Edit(
        "concept",
        "template <typename T> requires (sizeof(T) == 4) METAL_FUNC T same(T a) { return a; }",
        "y[i] += same(v);",
    ),
    Edit("double", body="double d = 1.0; y[i] += float(d);"),
    Edit("virtual", "struct B { virtual float f() { return 1; } };", "B b; y[i] += b.f();"),
    Edit(
        "recursion",
        "METAL_FUNC float r(float a) { return a > 100 ? a : r(a + 1.0f); }",
        "y[i] += r(v);",
    ),
    Edit(
        "recursion of two",
        "float r(float a);\nfloat s(float a) { return r(a); }\n"
        "float r(float a) { return a > 9 ? a : s(a + 1.0f); }",
        "y[i] += r(v);",
    ),
    Edit(
        "function pointer",
        "METAL_FUNC float g(float a) { return a; }",
        "float (*f)(float) = g; y[i] += f(v);",
    ),
    Edit("new", body="float* p = new float; y[i] += *p;"),
    Edit("goto", body="if (i == 0) goto end; y[i] = 1; end: ;"),
    Edit("standard library", body="y[i] += std::max(1, 2);"),
    Edit("array of variable length", body="float q[i + 1]; y[i] += q[0];"),
    Edit("cast without a space", body="y[i] += *reinterpret_cast<const float*>(x);"),
    Edit("store to what is constant", body="x[0] = 1.0f;"),
    Edit("float that becomes a bfloat", body="bfloat b = v; y[i] += float(b);"),
    Edit("float that becomes a constant bfloat", body="const bfloat b = v; y[i] += float(b);"),
    Edit("device pointer for threadgroup memory", body="threadgroup float* q = y; y[i] += q[0];"),
    Edit("simd_sum of 64 bits", body="y[i] += float(simd_sum(ulong(i)));"),
    Edit(
        "threadgroup atomic of 64 bits",
        body="threadgroup ulong q[1]; y[i] += float(atomic_fetch_add_explicit("
        "(threadgroup atomic<ulong>*)q, 1ul, memory_order_relaxed));",
    ),
    Edit(
        "memory order",
        body="threadgroup atomic_uint q[1];atomic_store_explicit(&q[0], 1u, memory_order_release);",
    ),
    Edit(
        "return before a barrier",
        old="threadgroup_barrier",
        new="if (i > 3) return; threadgroup_barrier",
    ),
    Edit(
        "return before a barrier of a helper",
        "METAL_FUNC void h() { threadgroup_barrier(mem_flags::mem_device); }",
        "if (i > 3) { return; } h();",
    ),
    Edit(
        "method of an object in constant",
        "struct C { float a; float get() const thread { return a; } };\n"
        "constant constexpr C TABLE[1] = {{1.0f}};",
        "y[i] += TABLE[0].get();",
    ),
    Edit(
        "method of an object in device memory",
        "struct C { float a; float get() const thread { return a; } };",
        "y[i] += ((const device C*)x)->get();",
    ),
    Edit(
        "what a function gives as a thread's reference",
        "METAL_FUNC Pair both(float a) { return {a, a}; }\n"
        "METAL_FUNC float h(const thread Pair& p, int n) { return p.a + n; }",
        "y[i] += h(both(v), 2);",
    ),
    Edit(
        "a new object as a thread's reference",
        "template <typename T> METAL_FUNC float h(const thread T& p) { return p.a; }",
        "y[i] += h<Pair>(Pair{1, 2});",
    ),
    Edit("function word as a name", body="float fragment = 1; y[i] += fragment;"),
    Edit("address space as a name", body="float ray_data = 1; y[i] += ray_data;"),
    Edit("another address space as a name", body="float object_data = 1; y[i] += object_data;"),
    Edit(
        "member function that does not say where its object is",
        "struct S { float a; float at() const { return a; } };",
        "S s = {1.0f}; y[i] += s.at();",
    ),
    Edit(
        "member of a class outside constant",
        "template <int M> struct S { static constexpr int N = M; float a; };",
        "y[i] += S<3>::N;",
    ),
    Edit(
        "method of what a function gives",
        "struct S { float a; float at() const thread { return a; } };\n"
        "METAL_FUNC S of(float a) { return {a}; }",
        "y[i] += of(v).at();",
    ),
    Edit("another space by a C cast", body="y[i] += *(threadgroup float*)x;"),
    Edit("another space by a cast", body="y[i] += *reinterpret_cast<const thread float*>(x);"),
    Edit(
        "a pointer into one of two spaces", body="const device float* q = i ? x : mine; y[i] = *q;"
    ),
    Edit(
        "threadgroup memory in a member of device",
        "struct S { const device float* p; };",
        "S s = {mine}; y[i] += s.p[0];",
    ),
    Edit(
        "a fragment read of thread memory", body=f"{FRAGMENT} float q[64]; simdgroup_load(m, q, 8);"
    ),
    Edit("a fragment that is not square", body="simdgroup_matrix<float, 8, 4> m;"),
    Edit("a fragment of integers", body="simdgroup_matrix<int, 8, 8> m;"),
    Edit("a fragment from a number", body="simdgroup_matrix<float, 8, 8> m = 0.0f;"),
    Edit("a constant fragment's element", body=f"const {FRAGMENT} m.thread_elements()[0] = 1.0f;"),
    Edit("a vector of too few numbers", body="float4 q = float4(v, v); y[i] += q.x;"),
    Edit("a vector of another type", body="float4 q = half4(1.0h); y[i] += q.x;"),
    Edit("bits of another size", body="y[i] += as_type<ushort>(v);"),
    Edit("the larger of two types", body="y[i] += max(1, i);"),
    Edit("a function of reals of an integer", body="y[i] += exp2(i);"),
    Edit("fewer bits in braces", "struct S { int a; };", "S s = {v}; y[i] += s.a;"),
    Edit(
        "an atomic operation on a number",
        body="atomic_fetch_add_explicit((device uint*)y, 1u, memory_order_relaxed);",
    ),
    Edit("bfloat as a half", body="bfloat b = bfloat(1.0f); half h = b; y[i] += h;"),
    Edit("elements of a fragment as a pair", body=f"{FRAGMENT} float2 p = m.thread_elements();"),
    Edit("a whole fragment multiplied", body=f"{FRAGMENT} m.thread_elements() *= 2.0f;"),
]


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
        threadgroup=(1, 1, 1),
        output_shape=(1,),
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
def test_large_kernels_of_mlx_have_sound_address_spaces(
    headers: Sequence[str], function: str, instance: str
) -> None:
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
