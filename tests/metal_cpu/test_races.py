"""Ordered accesses are no races, also with several readers between SIMD-group barriers."""

import mlx.core as mx
import pytest

from metal_cpu import MetalCPU, requires_compiler
from metal_cpu.examples import Example

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
    example = Example(
        text="// the body does it all",
        body=f"uint i = thread_position_in_grid.x;\n{START}\n{body}\n{END}",
        inputs={"x": mx.arange(64).astype(mx.float32)},
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shape=(64,),
    )
    machine = MetalCPU(seed=seed)
    example.run(machine)
    assert machine.reports[0].kinds() == ({"race"} if races else set())
