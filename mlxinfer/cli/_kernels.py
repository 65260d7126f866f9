"""`doctor --kernels`: every Metal kernel compared and timed with its twin, on this machine's GPU.

The report is kept; what models had checked is in it.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import default_kernel_folder
from ..layers.recurrence_check import SHAPES, TOLERANCE, difference
from ..metal_kernels.selfcheck import (
    CRASHED,
    KINDS,
    OK,
    Gpu,
    Verdict,
    Verdicts,
    judge,
    key_of,
    this_gpu,
    thread_limits,
)
from ..metal_kernels.variants import WORTH, is_kernel
from ._output import table


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The result of one variant."""

    variant: str
    status: str
    error: float | None
    tolerance: float | None
    detail: str
    speed: float | None = None  # how much faster than MLX's own operations
    # Load and tokens -> way -> microseconds of a call.
    times_us: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)  # largest difference, by load and tokens
    used: dict[int, str] = field(default_factory=dict)  # the way at each load,
    instead: dict[int, str] = field(default_factory=dict)  # and the one that a refusal leads to
    first_run_s: float | None = None  # compiling included
    accumulators: int = 0  # 8x8 sums that a SIMD group keeps in its loop
    # Most threads of a threadgroup, by kernel and form: Metal's maxTotalThreadsPerThreadgroup.
    most_threads: dict[str, int] = field(default_factory=dict)

    @property
    def cells(self) -> list[str]:
        is_used = any(map(is_kernel, self.used.values())) or self.speed is None
        unused = "" if is_used else ", not used"
        given = (self.error, self.tolerance, self.speed)
        figures = ["-" if figure is None else f"{figure:.3g}" for figure in given]
        return [self.variant, self.status, *figures[:2], figures[2] + unused]

    @property
    def remarks(self) -> list[str]:
        times = [
            f"{load}: {', '.join(f'{way} {time:.0f} us' for way, time in of.items())}"
            for load, of in self.times_us.items()
        ]
        return [f"{self.variant}: {text}" for text in ("; ".join(times), self.detail) if text]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The results of all variants that were checked."""

    about: str  # chip and versions, or why nothing was run
    rows: tuple[KernelRow, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.status == "ok" for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"ok": self.ok, "about": self.about, "kernels": rows}

    def as_text(self) -> str:
        if not self.rows:
            return self.about
        header = ("VARIANT", "VERDICT", "ERROR", "ALLOWED", "SPEED")
        remarks = [line for row in self.rows for line in row.remarks]
        return "\n".join(
            [self.about, table([row.cells for row in self.rows], header=header), *remarks]
        )


def kernel_report() -> KernelReport:
    gpu = this_gpu()
    if gpu is None:
        return KernelReport("There is no Metal here, so kernels are not used.")
    return on_gpu(gpu, default_kernel_folder())


def recurrence_rows() -> tuple[KernelRow, ...]:
    """Compare MLX's own gated delta recurrence with stepping, on the default device."""
    rows = []
    for shape in SHAPES:
        error = difference(shape)
        status = "ok" if error <= TOLERANCE else "differs"
        detail = "" if status == "ok" else "MLX's fused recurrence is not its own single steps."
        rows.append(KernelRow(str(shape), status, error, TOLERANCE, detail))
    return tuple(rows)


def on_gpu(gpu: Gpu, folder: Path) -> KernelReport:
    """Check and time every sample, add what models had checked, and keep the report in `folder`."""
    variants = [variant for kind in KINDS.values() for variant in kind.samples]
    samples = judge(variants, gpu=gpu, folder=folder, again=True)
    rows = [
        replace(
            _row(str(variant), verdict),
            accumulators=(sums := KINDS[variant.kind].accumulators(variant)),
            most_threads=thread_limits(variant) if sums and verdict.status == OK else {},
        )
        for variant, verdict in samples.items()
    ]
    keys = {key_of(variant) for variant in samples}
    texts = {key.partition("#")[2] for key in keys}  # of the kernels as they are now
    for key, verdict in Verdicts(folder, gpu.environment).read().items():
        name, _, text = key.partition(" #")
        if key not in keys and text in texts:
            rows.append(_row(name, verdict))
    about = (
        f"{gpu.environment}. A kernel is used at a load where it is right, and at least {WORTH} "
        "times as fast as any way of MLX's own operations. A load is a number of sequences, or of "
        "a prompt's tokens; x tokens of each."
    )
    if any(row.status == CRASHED for row in rows):
        about += f" What crashed is not run again; delete {folder} to have it run."
    report = KernelReport(about, (*rows, *recurrence_rows()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report.as_dict(), indent=1))
    return report


def _row(variant: str, verdict: Verdict) -> KernelRow:
    ways = {load: tuple(seconds) for load, seconds in verdict.loads.seconds.items()}
    in_mlx = {load: tuple(way for way in of if not is_kernel(way)) for load, of in ways.items()}
    return KernelRow(
        variant,
        verdict.status,
        verdict.error,
        verdict.tolerance,
        verdict.detail,
        verdict.speed,
        times_us={
            load: {way: time * 1e6 for way, time in of.items()}
            for load, of in verdict.times.items()
        },
        errors=verdict.errors,
        used={load: verdict.loads.fastest(load, of) for load, of in ways.items()},
        instead={load: verdict.loads.fastest(load, of) for load, of in in_mlx.items() if of},
        first_run_s=verdict.first_run_s,
    )
