"""Bytes are counted exactly, and tell MLX's kernels apart as its users found them to be."""

import mlx.core as mx
import pytest

from metal_cpu import MetalCPU, Report, requires_compiler
from metal_cpu.examples import Example
from metal_cpu.mlx_kernels import Attention, sdpa_vector, sdpa_vector_2pass

pytestmark = requires_compiler


def report_of(body: str, *, threads: int = 64, threadgroup: int = 64) -> Report:
    example = Example(
        body=f"uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n{body}",
        inputs={"x": mx.arange(256).astype(mx.float16), "scales": mx.ones((16,))},
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
    )
    machine = MetalCPU(seed=1)
    example.run(machine)
    machine.assert_clean()
    return machine.reports[0]


def test_loads_and_stores_of_each_buffer() -> None:
    report = report_of("out[i] = float(x[2 * i]) * scales[3];")
    x, scales, out = (report.buffers[name] for name in ("x", "scales", "out"))
    assert (x.num_loads, x.requested_bytes, x.unique_bytes) == (64, 128, 128)
    assert (scales.num_loads, scales.requested_bytes, scales.unique_bytes) == (64, 256, 4)
    assert scales.requested_once_per_simdgroup_bytes == 2 * 4
    assert scales.unique_per_threadgroup_bytes == 4
    assert (out.num_stores, out.stored_bytes, out.requested_bytes) == (64, 256, 0)
    both = report.total(["x", "scales"])
    assert (both.requested_bytes, both.num_loads) == (384, 128)


def test_lanes_share_an_address_only_at_the_same_turn_of_the_same_instruction() -> None:
    """Lanes walk over the same addresses, one apart: at no turn do two lanes load the same."""
    walked = report_of("float s = 0; for (uint j = 0; j < 8; j++) s += scales[(lane + j) % 16];\n"
                       "out[i] = s;")  # fmt: skip
    scales = walked.buffers["scales"]
    assert scales.requested_bytes == 64 * 8 * 4
    assert scales.requested_once_per_simdgroup_bytes == 2 * 8 * 16 * 4, "16 of 32 lanes differ"
    assert scales.unique_bytes == 64
    met = report_of("float s = 0; for (uint j = 0; j < 8; j++) s += simd_sum(scales[j]);\n"
                    "out[i] = s;")  # fmt: skip
    assert met.buffers["scales"].requested_once_per_simdgroup_bytes == 2 * 8 * 4


def test_threadgroup_memory_and_operations_are_counted() -> None:
    report = report_of(
        "threadgroup float a[64], b[8];\n"
        "a[i % 64] = 1; threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (i == 0) b[0] = a[1]; simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = simd_max(a[63 - i % 64]);",
        threads=128,
    )
    assert report.threadgroup_bytes == 4 * 72
    assert (report.threadgroup_memory.num_loads, report.threadgroup_memory.num_stores) == (129, 129)
    assert (report.num_threadgroups, report.num_threads) == (2, 128)
    assert (report.num_simd_ops, report.num_threadgroup_barriers) == (4, 2)
    assert report.num_simdgroup_barriers == 4


def test_attention_kernels_are_told_apart() -> None:
    """One pass reads keys once for each query head; two passes share them in a threadgroup, or in
    registers. So say the sources, and so do users' measurements of what limits each.
    """
    heads, kv_heads, num_keys, dim = 16, 2, 256, 128
    call = Attention(
        mx.ones((1, heads, 1, dim), mx.float16),
        *(mx.ones((1, kv_heads, num_keys, dim), mx.float16) for _ in range(2)),
        num_keys,
        dim**-0.5,
    )
    least, group = call.keys.nbytes, heads // kv_heads
    (one,) = sdpa_vector(call).reports
    plain, _ = sdpa_vector_2pass(call, blocks=32).reports
    sharing, _ = sdpa_vector_2pass(call, blocks=32, shared=4).reports
    for report, requested, per_threadgroup in (
        (one, group * least, group * least),
        (plain, group * least, least),
        (sharing, group // 4 * least, least),
    ):
        for name in ("keys", "values"):
            traffic = report.buffers[name]
            assert traffic.requested_bytes == requested
            assert traffic.unique_per_threadgroup_bytes == per_threadgroup
            assert traffic.unique_bytes == least


@pytest.mark.parametrize(
    ("place", "ways"),
    [
        ("lane", 1),  # a word each, one after another
        ("0", 1),  # one word for all
        ("lane * 2", 2),
        ("lane * 8", 8),
        ("lane * 9", 1),  # padded
        ("lane * 32", 32),
    ],
)
def test_conflicts_of_banks_are_counted(place: str, ways: int) -> None:
    report = report_of(
        "threadgroup float tile[1024]; for (uint j = lane; j < 1024; j += 32) tile[j] = j;\n"
        f"simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[{place}];",
        threads=32,
        threadgroup=32,
    )
    assert report.bank_ways == ways


def test_wide_loads_may_take_their_turns() -> None:
    report = report_of(
        "threadgroup float4 tile[32]; tile[lane] = float4(lane); out[i] = tile[lane][lane % 4];",
        threads=32,
        threadgroup=32,
    )
    assert report.bank_ways == 1
