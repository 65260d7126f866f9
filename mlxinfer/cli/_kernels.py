"""`doctor --kernels`: every Metal kernel compared with its twin, on the GPU or in the test harness.

On a Mac kernels are timed too, and the report is kept; what models had checked is in it. Elsewhere,
in a checkout with the test requirements, `tests/metal_cpu` executes them on the CPU: that shows
what they compute and whether they are correct, not how fast they are.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import default_kernel_folder
from ..layers.recurrence_check import SHAPES, TOLERANCE, difference
from ..metal_kernels.selfcheck import (
    CRASHED,
    KINDS,
    WORTH,
    Gpu,
    Verdict,
    Verdicts,
    examine,
    judge,
    key_of,
    this_gpu,
)
from ..metal_kernels.variants import Variant
from ._output import table

HARNESS_SAMPLES = 2  # variants of a kind; each is compiled, which takes some seconds
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
    speed: float | None = None  # on the GPU: how much faster than MLX's own operations
    # Sequences and tokens before them -> microseconds of a call of the kernel, and of MLX's own.
    times_us: dict[str, tuple[float, float]] = field(default_factory=dict)

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
        header = ["VARIANT", "VERDICT", "ERROR", "ALLOWED", "SPEED" if timed else "FAULTS"]
        lines = [self.about]
        if self.rows:
            lines.append(table([_cells(row, timed) for row in self.rows], header=header))
        for row in self.rows:
            times = [f"{load}: {a:.0f} us, MLX {b:.0f} us" for load, (a, b) in row.times_us.items()]
            said = ("; ".join(times), row.detail, *row.faults)
            lines += [f"{row.variant}: {text}" for text in said if text]
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
    """Check and time every sample, add what models had checked, and keep the report in `folder`."""
    samples = judge(_samples(None), gpu=gpu, folder=folder, again=True)
    rows = [_row(str(variant), verdict) for variant, verdict in samples.items()]
    own = {key_of(variant) for variant in samples}
    texts = {key.partition("#")[2] for key in own}  # of the kernels as they are now
    for key, verdict in Verdicts(folder, gpu.environment).read().items():
        name, _, text = key.partition(" #")
        if key not in own and text in texts:
            rows.append(_row(name, verdict))
    about = (
        f"{gpu.environment}. A kernel is used where it is right, and at least {WORTH} times as "
        "fast as MLX's own operations, over so many sequences x tokens before them."
    )
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
            rows.append(_row(str(variant), verdict, faults=faults))
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


def _row(variant: str, verdict: Verdict, faults: tuple[str, ...] = ()) -> Row:
    times_us = {load: (a * 1e6, b * 1e6) for load, (a, b) in verdict.times.items()}
    found = (verdict.status, verdict.error, verdict.tolerance, verdict.detail)
    return Row(variant, *found, faults, verdict.speed, times_us)


def _cells(row: Row, timed: bool) -> list[str]:
    cells = [row.variant, row.status, _figure(row.error), _figure(row.tolerance)]
    if not timed:
        return [*cells, str(len(row.faults))]
    slower = row.speed is not None and row.speed < WORTH
    return [*cells, _figure(row.speed) + (", not used" if slower else "")]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _tests_folder() -> Path:
    return Path(__file__).resolve().parents[2] / "tests"


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
