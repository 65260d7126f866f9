"""Every fault is found, in its line, and sound kernels have none: what reports are worth."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from metal_cpu import KernelStopped, MetalCPU, requires_compiler
from metal_cpu.examples import BARRIER, COUNTS, ROW_SUMS, TURNED, Example, turned_expected
from tests.tables import table

pytestmark = [requires_compiler, pytest.mark.ci]

MUTANTS: dict[str, Any] = table(__file__, "mutants.yml")["mutants"]
EXAMPLES = {
    "rows": ROW_SUMS,
    "turned": TURNED,
    "counts": COUNTS,
    "counts by two": replace(COUNTS, threadgroup=(32, 1, 1)),
}


def row_sums_expected() -> mx.array:
    return ROW_SUMS.inputs["x"].astype(mx.float32).sum(1)


@pytest.mark.alike
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    example, old, new, kind, *at = MUTANTS[name]
    machine = MetalCPU(replace={old: new})
    EXAMPLES[example].run(machine)
    (report,) = machine.reports
    places = [(fault.file, fault.line) for fault in report.faults if fault.kind == kind]
    assert places, report.faults
    for fragment in at:
        assert ("example.metal", EXAMPLES[example].line_of(fragment, {old: new})) in places
    with pytest.raises(AssertionError, match=kind):
        machine.assert_clean()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("example", "expected"),
    [
        pytest.param(ROW_SUMS, row_sums_expected, id="row sums"),
        pytest.param(TURNED, turned_expected, id="turned"),
        pytest.param(COUNTS, lambda: mx.full((8,), 8), id="counts"),
    ],
)
def test_sound_kernels_pass(example: Example, expected: Callable[[], mx.array], seed: int) -> None:
    machine = MetalCPU(seed=seed)
    out = example.run(machine)
    machine.assert_clean()
    assert mx.allclose(out.astype(mx.float32), expected(), rtol=1e-3)


def test_too_many_threads_are_a_fault() -> None:
    machine = MetalCPU()
    replace(ROW_SUMS, grid=(2048, 1, 1), threadgroup=(2048, 1, 1)).run(machine)
    assert machine.reports[0].kinds() >= {"limit"}


def test_unchecked_runs_raise_where_threads_diverge() -> None:
    machine = MetalCPU(checked=False, replace={BARRIER: f"if (lane < 9) {BARRIER}"})
    with pytest.raises(KernelStopped, match="9 lanes from 0 on at threadgroup_barrier"):
        ROW_SUMS.run(machine)
    sound = MetalCPU(checked=False)
    assert mx.allclose(ROW_SUMS.run(sound), row_sums_expected())


def test_an_output_may_stay_unwritten_but_not_be_read() -> None:
    machine = MetalCPU(may_stay_unwritten=["out"])
    text = ROW_SUMS.text.replace("out[row] = total", "if (row != 4) out[row] = total")
    out = replace(ROW_SUMS, text=text).run(machine)
    machine.assert_clean()
    assert mx.isnan(out).tolist() == [False] * 4 + [True, False]
    body = "out[thread_position_in_grid.x] = x[thread_position_in_grid.x];"
    copy = Example(body=body, inputs={"x": out}, grid=(6, 1, 1))
    copy.run(machine)
    assert machine.reports[1].kinds() == {"uninitialised read"}
    copy.run(fresh := MetalCPU())
    fresh.assert_clean()
