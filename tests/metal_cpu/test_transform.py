"""Metal's words become C++ by tokens, and nothing else of a text changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_cpu.signature import Parameter, parameters
from metal_cpu.source import Part, flattened
from metal_cpu.tokens import joined, tokens
from metal_cpu.transform import transformed


@given(st.text(alphabet="ab\n\"'/*\\#[](){}<>;.1eh \t"))
def test_tokens_of_any_text_are_the_whole_text(text: str) -> None:
    pieces = list(tokens(text))
    assert joined(pieces) == text
    assert [p.line for p in pieces] == [
        1 + joined(pieces[:i]).count("\n") for i in range(len(pieces))
    ]


@pytest.mark.parametrize(("metal", "cpp"), [
    ("float4 v = float4(1, x);", "float4 v = msl::make<float4>(1, x);"),
    ("vec<T, 4>(a)", "msl::make<vec<T, 4>>(a)"),
    ("metal::vec<float, 2>(a)", "metal::msl::make<vec<float, 2>>(a)"),
    ("vec<T, 4> v = {a};", "vec<T, 4> v = {a};"),
    ("operator float4() const", "operator float4() const"),
    ("x = 1.5h + 2.h + 3e-2bf;", "x = half(1.5) + half(2.) + bfloat(3e-2);"),
    ("x = 0x1bf + 0xbf;", "x = 0x1bf + 0xbf;"),
    ("uint i [[thread_index_in_simdgroup]]", "uint i "),
    ("[[kernel, max_total_threads_per_threadgroup(A * 32)]] void f()", " void f()"),
    ('template [[host_name("x")]] [[kernel]] decltype(f<1>) f<1>; int a;', " int a;"),
    ("constant bool b [[function_constant(7)]];", "constexpr constant bool b = bool(1);"),
    ("constant int b [[function_constant(8)]];", "constexpr constant int b = int(0);"),
    ("void f(threadgroup float* p)", "void f(threadgroup float* p)"),
    ("{ threadgroup float* p = q; }", "{ threadgroup float* p = q; }"),
    ("struct S { threadgroup T& x; };", "struct S { threadgroup T& x; };"),
])  # fmt: skip
def test_words_of_metal_become_those_of_cpp(metal: str, cpp: str) -> None:
    assert transformed(metal, {7: 1}) == cpp


def test_lines_stay_where_they_are() -> None:
    text = "a;\nthreadgroup\nfloat x[2],\n  y;\nb [[\nz]] c;\nfloat4\n(1) d"
    lines = transformed(text, {}).split("\n")
    assert (lines[0], lines[4], lines[5], lines[7]) == ("a;", "b ", " c;", "(1) d")


def test_parameters_are_what_a_signature_binds() -> None:
    text = """
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(32)]] void k(
    const device T* x [[buffer(2)]], constant int& n, device float* out [[buffer(5)]],
    // a comment, with a comma
    const device Pair<int, T>* pairs [[buffer(6), function_constant(some)]],
    uint3 gid [[threadgroup_position_in_grid]], uint width [[thread_execution_width]]) {}
"""
    assert parameters(list(tokens(text)), "k") == [
        Parameter("x", "buffer", 2),
        Parameter("n", "buffer", 3),
        Parameter("out", "buffer", 5),
        Parameter("pairs", "buffer", 6),
        Parameter("gid", "threadgroup_position_in_grid"),
        Parameter("width", "threads_per_simdgroup"),
    ]
    with pytest.raises(ValueError, match="no kernel other"):
        parameters(list(tokens(text)), "other")
    with pytest.raises(ValueError, match="stage_in"):
        parameters(list(tokens("kernel void k(float x [[stage_in]])")), "k")


def test_includes_are_put_in_place_once() -> None:
    name = "mlx/backend/metal/kernels/bf16.h"
    text = flattened((Part("a.metal", f'one\n#include "{name}"\ntwo\n#include "{name}"\nthree\n'),))
    assert text.count("typedef bfloat bfloat16_t;") == 1
    assert '#line 1 "bf16.h"' in text
    assert '#line 3 "a.metal"\ntwo\n#line 5 "a.metal"\nthree\n' in text
    kept = '#include <metal_stdlib>\n#include "not/there.h"\n'
    assert flattened((Part("a", kept),)) == f'#line 1 "a"\n{kept}'
