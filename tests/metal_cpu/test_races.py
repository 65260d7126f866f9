"""Ordered accesses are no races, in any order of threads; and a seed is such an order."""

import mlx.core as mx
import pytest

from metal_cpu import MetalCPU, requires_compiler
from metal_cpu.examples import BARRIER, ROW_SUMS, Example

pytestmark = [requires_compiler, pytest.mark.ci]

TOGETHER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
ALL = "threadgroup_barrier(mem_flags::mem_threadgroup);"
START = f"threadgroup float a[2]; if (i == 0) {{ a[0] = 1; a[1] = 2; }} {ALL} float got = a[0];"
END = "out[i] = got;"
# The body between what all threads of two SIMD groups read, and the end; whether it races.
BODIES = {
    "a write that the SIMD group waits for, of what the other reads": (
        f"{TOGETHER} if (i == 3) a[0] = 5;",
        True,
    ),
    "a write that all wait for": (f"{ALL} if (i == 3) a[0] = 5;", False),
    "a write beside lanes that read again": (
        f"{ALL} if (i < 4) got += a[0]; {TOGETHER} if (i == 0) got += a[0]; if (i == 3) a[0] = 5;",
        True,
    ),
    "a write by the lane that read again": (
        f"{ALL} if (i < 4) got += a[0]; {TOGETHER} if (i == 3) {{ got += a[0]; a[0] = 5; }}",
        False,
    ),
    "a write after reads of two epochs": (
        f"{ALL} if (i < 4) got += a[0]; {TOGETHER} if (i < 4) got += a[0];"
        f"{TOGETHER} if (i == 9) a[0] = 5;",
        False,
    ),
    "a write after reads of one epoch and of the next": (
        f"{ALL} if (i < 4) got += a[0]; {TOGETHER} if (i < 4) got += a[0]; if (i == 9) a[0] = 5;",
        True,
    ),
    "a read by the other SIMD group, and a wait in this one": (
        f"{ALL} if (i == 40) got += a[0]; if (i < 4) got += a[0]; {TOGETHER} if (i == 3) a[0] = 5;",
        True,
    ),
}


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BODIES)
def test_races_of_a_kernel_are_reported(name: str, seed: int) -> None:
    body, races = BODIES[name]
    body = f"uint i = thread_position_in_grid.x;\n{START}\n{body}\n{END}"
    inputs = {"x": mx.arange(64).astype(mx.float32)}
    example = Example(body=body, inputs=inputs, grid=(64, 1, 1))
    machine = MetalCPU(seed=seed)
    example.run(machine)
    assert machine.reports[0].kinds() == ({"race"} if races else set())


ORDER = Example(  # each thread notes how many came before it
    body="""
    out[thread_position_in_grid.x] = atomic_fetch_add_explicit(
        (device atomic<uint>*)&out[192], 1u, memory_order_relaxed);
    """,
    inputs={"x": mx.zeros((1,))},
    grid=(192, 1, 1),
    threadgroup=(96, 1, 1),
    output_shape=(193,),
    output_dtype=mx.uint32,
)


def order_of(seed: int) -> list[int]:
    """Threads in the order in which they ran."""
    counts = ORDER.run(MetalCPU(seed=seed, checked=False))[:192]
    return mx.argsort(counts + 1).tolist()  # fresh memory has every bit set, so the first got -1


def test_seed_zero_runs_threads_in_order() -> None:
    assert order_of(0) == list(range(192))


def test_other_seeds_shuffle_threadgroups_simdgroups_and_lanes() -> None:
    orders = {seed: order_of(seed) for seed in range(1, 9)}
    assert orders[3] == order_of(3)
    assert len({tuple(order) for order in orders.values()}) == 8
    for order in orders.values():
        assert sorted(order) == list(range(192))
        assert order[:32] != sorted(order[:32]), "lanes in a row"
        for start in range(0, 192, 32):
            assert len({thread // 32 for thread in order[start : start + 32]}) == 1
    assert {order[0] // 96 for order in orders.values()} == {0, 1}
    assert len({order[0] // 32 for order in orders.values()}) > 2


def test_an_unsound_kernel_shows_it_even_unchecked() -> None:
    """Threadgroup memory holds NaN until it is written, so reading too early cannot go unseen."""
    for seed in range(4):
        out = ROW_SUMS.run(MetalCPU(seed=seed, checked=False, replace={BARRIER: ""}))
        assert mx.isnan(out).any()
