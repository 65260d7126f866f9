"""`doctor --kernels`: every Metal kernel compared with its twin, on the GPU or in the test harness.

On a Mac kernels are timed too, and the report is kept. Elsewhere, in a checkout with the test
requirements, `tests/metal_cpu` executes them on the CPU: that shows what they compute and whether
they are correct, not how fast they are.
"""

import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import default_kernel_folder
from ..layers.recurrence_check import SHAPES, TOLERANCE, difference
from ..metal_kernels.kinds import KINDS
from ..metal_kernels.launch import running_on
from ..metal_kernels.selfcheck import Gpu, examine, judge, this_gpu
from ..metal_kernels.variants import Variant
from ..metal_kernels.verdicts import CRASHED, Verdict
from ._output import table

HARNESS_SAMPLES = 2  # variants of a kind; each is compiled, which takes some seconds
ROUNDS, CALLS = 15, 10  # medians of rounds, each of so many calls in a row
GPU, HARNESS, NOWHERE = "gpu", "harness", "nowhere"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one variant."""

    variant: str
    status: str
    error: float | None
    tolerance: float | None
    detail: str
    faults: tuple[str, ...] = ()  # in the harness
    kernel_us: float | None = None  # on the GPU, one call
    mlx_us: float | None = None  # the same by MLX's own operations

    @property
    def ok(self) -> bool:
        """Whether the kernel is right and makes no invalid access."""
        return self.status == "ok" and not self.faults


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The results of all variants that were checked."""

    where: str  # GPU, HARNESS or NOWHERE
    about: str  # chip and versions, or why nothing was run
    rows: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no variant failed; true also where none could be run."""
        return all(row.ok for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"ok": self.ok, "where": self.where, "about": self.about, "kernels": rows}

    def as_text(self) -> str:
        """A table for people, with remarks about single variants."""
        timed = self.where == GPU
        header = ["VARIANT", "VERDICT", "ERROR", "ALLOWED"]
        header += ["KERNEL us", "MLX us", "RATIO"] if timed else ["FAULTS"]
        lines = [self.about]
        if self.rows:
            lines.append(table([_cells(row, timed) for row in self.rows], header=header))
        for row in self.rows:
            lines += [f"{row.variant}: {said}" for said in (row.detail, *row.faults) if said]
        return "\n".join(lines)


def kernel_report() -> KernelReport:
    """Check every kernel, as thoroughly as this machine allows."""
    gpu = this_gpu()
    if gpu is not None:
        return on_gpu(gpu, default_kernel_folder())
    missing = harness_missing()
    if missing:
        return KernelReport(NOWHERE, f"There is no Metal here, so kernels are not used. {missing}")
    return in_harness()


def recurrence_rows() -> tuple[Row, ...]:
    """Compare MLX's own gated delta recurrence with stepping, on the default device."""
    rows = []
    for shape in SHAPES:
        error = difference(shape)
        status = "ok" if error <= TOLERANCE else "differs"
        detail = "" if status == "ok" else "MLX's fused recurrence is not its own single steps."
        rows.append(Row(str(shape), status, error, TOLERANCE, detail))
    return tuple(rows)


def on_gpu(gpu: Gpu, folder: Path) -> KernelReport:
    """Check and time every sample, and keep the report in `folder`."""
    rows = []
    for variant in _samples(None):
        verdict = judge([variant], gpu=gpu, folder=folder, again=True)[variant]
        kernel_us, mlx_us = _times(variant, gpu) if verdict.usable else (None, None)
        rows.append(_row(variant, verdict, kernel_us=kernel_us, mlx_us=mlx_us))
    about = f"{gpu.environment}. Times are medians of {ROUNDS} rounds on this machine."
    if any(row.status == CRASHED for row in rows):
        about += f" What crashed is not run again; delete {folder} to have it run."
    report = KernelReport(GPU, about, (*rows, *recurrence_rows()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report.as_dict(), indent=1))
    return report


def in_harness() -> KernelReport:
    """Execute some variants of each kernel on the CPU, with every memory access checked."""
    rows = []
    with _importable(_tests_folder()):
        machine_class = importlib.import_module("metal_cpu").MetalCPU
        for variant in _samples(HARNESS_SAMPLES):
            machine = machine_class(seed=1, checked=True)
            verdict = examine(variant, machine)
            faults = tuple(str(fault) for report in machine.reports for fault in report.faults)
            rows.append(_row(variant, verdict, faults=faults))
    about = (
        "There is no Metal here, so kernels are not used. Executed on the CPU, the source that MLX "
        "would compile does this:"
    )
    return KernelReport(HARNESS, about, (*rows, *recurrence_rows()))


def harness_missing() -> str:
    """Return what has to be installed to execute kernels on the CPU, "" if nothing."""
    if not (_tests_folder() / "metal_cpu" / "__init__.py").is_file():
        return "A checkout of the source can execute them on the CPU; an installed package cannot."
    absent = [name for name in ("ziglang", "pytest") if importlib.util.find_spec(name) is None]
    return 'To execute them on the CPU: pip install -e ".[test]"' if absent else ""


def _samples(limit: int | None) -> list[Variant]:
    return [variant for kind in KINDS.values() for variant in kind.samples[:limit]]


def _row(variant: Variant, verdict: Verdict, **more: Any) -> Row:
    found = (verdict.status, verdict.error, verdict.tolerance, verdict.detail)
    return Row(str(variant), *found, **more)


def _cells(row: Row, timed: bool) -> list[str]:
    cells = [row.variant, row.status, _figure(row.error), _figure(row.tolerance)]
    if not timed:
        return [*cells, str(len(row.faults))]
    if row.kernel_us is None or row.mlx_us is None:
        return [*cells, "-", "-", "-"]
    return [
        *cells,
        f"{row.kernel_us:.0f}",
        f"{row.mlx_us:.0f}",
        f"{row.mlx_us / row.kernel_us:.2f}",
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _times(variant: Variant, gpu: Gpu) -> tuple[float, float]:
    """Return microseconds per call of the kernel and of MLX's own way, measured in turns."""
    case = KINDS[variant.kind].timed(variant)
    kernel, mlx = [], []
    with running_on(gpu.device):
        for _ in range(ROUNDS + 1):  # the first compiles
            kernel.append(_time_us(case.kernel))
            mlx.append(_time_us(case.twin))
    return statistics.median(kernel[1:]), statistics.median(mlx[1:])


def _time_us(call: Callable[[], list[mx.array]]) -> float:
    start = time.perf_counter()
    mx.eval([call() for _ in range(CALLS)])
    return (time.perf_counter() - start) / CALLS * 1e6


def _tests_folder() -> Path:
    return Path(__file__).resolve().parents[2] / "tests"


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
