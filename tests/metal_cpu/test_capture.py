"""What MLX hands to Metal is what runs: signatures, address spaces, shapes, files and lines."""

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest

from metal_cpu import MetalCPU, requires_compiler
from metal_cpu.build import CompileError
from metal_cpu.capture import capture
from metal_cpu.examples import Example
from mlxinfer.metal_kernels.launch import Launch, MetalKernel, TemplateValue, compiled

pytestmark = requires_compiler

DESCRIBED = Example(
    text="""
template <typename P, typename S>
METAL_FUNC int described(P lengths, const constant int* shape, S strides, int ndim, int i) {
  return lengths[i] * 1000 + shape[0] * 100 + int(strides[0]) * 10 + ndim;
}
""",
    body="""
    int i = thread_position_in_grid.x;
    out[i] = described(lengths, grid_shape, grid_strides, grid_ndim, i) + int(one * 2.0f);
    """,
    inputs={"lengths": mx.arange(12), "grid": mx.zeros((3, 4)), "one": mx.array(1.0)},
    grid=(12, 1, 1),
    threadgroup=(8, 1, 1),
    output_shape=(12,),
    output_dtype=mx.int32,
)


@pytest.mark.parametrize("batch", [1, 7, 8, 12])
def test_small_inputs_are_constants_and_large_ones_are_not(batch: int) -> None:
    """MLX puts inputs of fewer than 8 elements into another address space."""
    example = replace(
        DESCRIBED,
        inputs={**DESCRIBED.inputs, "lengths": mx.arange(batch)},
        grid=(batch, 1, 1),
        output_shape=(batch,),
    )
    machine = MetalCPU()
    assert example.run(machine).tolist() == [i * 1000 + 300 + 40 + 2 + 2 for i in range(batch)]
    machine.assert_clean()
    body = capture(example.launch(), list(example.inputs.values())).kernel.parts[-1].text
    assert (f"{'constant' if batch < 8 else 'device'} int32_t* lengths" in body) is True


def test_a_helper_for_one_address_space_is_refused_for_the_other() -> None:
    text = DESCRIBED.text.replace("typename P, ", "").replace(
        "P lengths", "const device int* lengths"
    )
    example = replace(DESCRIBED, text=text)
    example.run(machine := MetalCPU())
    machine.assert_clean()
    small = replace(
        example, inputs={**example.inputs, "lengths": mx.arange(7)}, grid=(7, 1, 1),
        output_shape=(7,),
    )  # fmt: skip
    small.run(machine)
    assert {(fault.kind, fault.file) for fault in machine.reports[1].faults} == {
        ("address space", "body")
    }


def test_what_differs_in_its_text_has_another_name() -> None:
    """Some versions of MLX keep one library for each name, and would compile in every step."""
    kernel = MetalKernel("sample", ("x",), ("out",), "out[0] = x[0];")
    other = replace(kernel, body="out[0] = N * x[0];")
    values: list[Sequence[tuple[str, TemplateValue]]] = [
        [],
        [("N", 3)],
        [("N", 4)],
        [("T", mx.float16)],
    ]

    def name(kernel: MetalKernel, template: Sequence[tuple[str, TemplateValue]]) -> str:
        launch = Launch(kernel, template, (1, 1, 1), (1, 1, 1), [(1,)], [mx.float32])
        return capture(launch, [mx.zeros((8,))]).kernel.function

    names = [name(k, template) for k in (kernel, other) for template in values]
    assert len(set(names)) == 2 * len(values)
    assert name(replace(kernel), values[1]) == names[1]


def test_a_kernel_is_declared_for_the_threads_of_its_threadgroup() -> None:
    """Else a compiler may plan for fewer, and MLX refuses the launch."""
    kernel = MetalKernel("sample", ("x",), ("out",), "out[0] = x[0];")

    def text(threadgroup: tuple[int, int, int]) -> str:
        launch = Launch(kernel, (), (512, 4, 1), threadgroup, [(1,)], [mx.float32])
        return capture(launch, [mx.zeros((8,))]).kernel.parts[-1].text

    assert text((512, 1, 1)).split()[:2] == [
        "[[max_total_threads_per_threadgroup(512)]]",
        "[[kernel]]",
    ]
    assert "[[max_total_threads_per_threadgroup(128)]]" in text((32, 4, 1))


@pytest.mark.parametrize("dtype", [
    mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32,
    mx.uint32, mx.int64, mx.uint64, mx.bool_,
])  # fmt: skip
def test_every_type_comes_through(dtype: mx.Dtype) -> None:
    x = (mx.arange(9) % 2 if dtype == mx.bool_ else mx.arange(9)).astype(dtype)
    example = Example(
        body="out[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
        inputs={"x": x[None]},
        grid=(9, 1, 1),
        threadgroup=(4, 1, 1),
        output_shape=(3, 3),
        output_dtype=dtype,
    )
    assert mx.array_equal(example.run(MetalCPU(checked=False)), x.reshape(3, 3))


def test_inputs_lie_as_unaligned_as_slices_may() -> None:
    body = "uint i = thread_position_in_grid.x; out[i] = ((const device half4*)x)[i].x;"
    inputs = {"x": mx.arange(32).astype(mx.float16)}
    example = Example(body=body, inputs=inputs, grid=(8, 1, 1))
    example.run(aligned := MetalCPU())
    aligned.assert_clean()
    example.run(slices := MetalCPU(least_alignment=True))
    assert slices.reports[0].kinds() == {"misaligned"}


def test_threadgroup_memory_lies_as_unaligned_as_its_type_may() -> None:
    example = Example(
        body="threadgroup float wide[8]; uint i = thread_position_in_grid.x; wide[i] = x[i];"
        "threadgroup_barrier(mem_flags::mem_threadgroup);"
        "out[i] = ((threadgroup float2*)wide)[i / 2].x;",
        inputs={"x": mx.arange(8).astype(mx.float32)},
        grid=(8, 1, 1),
    )
    example.run(machine := MetalCPU())
    assert machine.reports[0].kinds() == {"misaligned"}
    enough = MetalCPU(
        replace={
            "threadgroup float wide[8]": "threadgroup float4 made[2]; "
            "threadgroup float* wide = (threadgroup float*)made"
        }
    )
    example.run(enough)
    enough.assert_clean()


@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_misaligned_vector_is_a_fault_and_not_the_end_of_the_process(verb: str) -> None:
    """x86-64 ends a process that moves 16 bytes to or from an address that is no multiple of 16."""
    body = {
        "load": "((device float4*)out)[i] = ((const device float4*)(x + 1))[i];",
        "store": "((device float4*)(out + 1))[i] = float4(x[i]);",
    }
    example = Example(
        body=f"uint i = thread_position_in_grid.x; {body[verb]}",
        inputs={"x": mx.arange(64).astype(mx.float32)},
        grid=(8, 1, 1),
        output_shape=(64,),
    )
    example.run(machine := MetalCPU())
    (fault,) = [item for item in machine.reports[0].faults if item.kind == "misaligned"]
    assert fault.message.startswith(f"{verb} of 16 bytes")


def test_edges_of_a_grid_have_smaller_threadgroups() -> None:
    example = Example(
        body="""
        uint i = thread_position_in_grid.x + 5 * thread_position_in_grid.y;
        out[i] = 100 * threads_per_threadgroup.x + 10 * threads_per_threadgroup.y
            + thread_index_in_threadgroup;
        """,
        inputs={"x": mx.zeros((1,))},
        grid=(5, 3, 1),
        threadgroup=(4, 2, 9),
        output_shape=(3, 5),
        output_dtype=mx.uint32,
    )
    machine = MetalCPU()
    assert example.run(machine).tolist() == [
        [420, 421, 422, 423, 120],
        [424, 425, 426, 427, 121],
        [410, 411, 412, 413, 110],
    ]
    assert machine.reports[0].num_threadgroups == 4


def test_what_does_not_compile_says_where() -> None:
    example = replace(DESCRIBED, text="\n\nMETAL_FUNC int described() { return unknown; }")
    with pytest.raises(CompileError, match=r"example\.metal:3:\d+: error: .*'unknown'"):
        example.run(MetalCPU())


def test_files_of_a_kernel_keep_their_lines() -> None:
    kernel = MetalKernel("sample", ("x",), ("out",), "out[0] = x[0];")
    launch = Launch(kernel, (), (1, 1, 1), (1, 1, 1), [(1,)], [mx.float32])
    _, *parts = capture(launch, [mx.zeros((1,))]).kernel.parts
    assert [part.file for part in parts] == ["sample.metal", "body"]
    written = files("mlxinfer.metal_kernels").joinpath("sample.metal").read_text().splitlines()
    kept = parts[0].text.splitlines()
    assert len(kept) == len(written)
    for there, left in zip(written, kept, strict=True):
        assert left == there.strip() if "//" not in there else there.strip().startswith(left)


def test_rounding_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's own default may change; twins are compared under "safe" mathematics."""
    options: list[object] = []

    def metal_kernel(**arguments: object) -> object:
        options.append(arguments["compile_options"])
        return object()

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    compiled.__wrapped__(MetalKernel("sample", ("x",), ("out",), "out[0] = x[0];"), (), 32)
    assert options == [{"math_mode": "safe"}]


def test_helpers_of_kernels_are_inlined() -> None:
    """Metal calls what is not: arrays of threads would leave registers. Templates are inlined."""
    defined = re.compile(r"^(?:[\w:]+(?:<.*>)? )+(\w+)\(", re.MULTILINE)
    seen = 0
    for path in sorted(Path(str(files("mlxinfer.metal_kernels"))).glob("*.[mh]*")):
        text = path.read_text() if path.suffix in (".metal", ".h") else ""
        for match in defined.finditer(text):
            before = text[: match.start()].rstrip()  # a template's arguments may take lines
            stated = match[0].startswith(("METAL_FUNC ", "constexpr "))
            assert stated or before.endswith(">"), (path.name, match[1])
            seen += 1
    assert seen > 20
