"""Threads, registers and threadgroup memory of every kernel's launches, beside the smallest chip's.

Threads and threadgroup memory are those of the self-check's launches, run on the CPU; registers are
the estimate that stands beside each kernel. A launch above the budget is not refused: kernels are
declared for their threads, and compilers spill what does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlxinfer.bench.report import Table
from mlxinfer.metal_kernels.attention_shape import REGISTER_BUDGET, THREADGROUP_BUDGET
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.selfcheck import KINDS
from mlxinfer.metal_kernels.variants import Variant


@dataclass(frozen=True, slots=True)
class LaunchSize:
    """The largest launch of a variant.

    Attributes:
        variant: in words.
        threads: of a threadgroup.
        registers: of a lane, estimated.
        threadgroup_bytes: of memory that a threadgroup shares.
    """

    variant: str
    threads: int
    registers: int
    threadgroup_bytes: int

    @property
    def share(self) -> float:
        """Registers of a threadgroup over the budget."""
        return self.threads * self.registers / REGISTER_BUDGET

    @property
    def fits(self) -> bool:
        """Whether registers and threadgroup memory are within the budget."""
        return self.share <= 1 and self.threadgroup_bytes <= THREADGROUP_BUDGET


def launch_size(variant: Variant, device: object) -> LaunchSize:
    """Return the largest launch of a variant's self-check on `device`, which runs on the CPU."""
    kind = KINDS[variant.kind]
    with running_on(device):  # type: ignore[arg-type]
        mx.eval(kind.case(variant).kernel())
    own = [r for r in device.reports if r.kernel != "attention_reduce"]  # type: ignore[attr-defined]
    return LaunchSize(
        str(variant),
        max(prod(report.threadgroup) for report in own),
        kind.registers(variant),
        max(report.threadgroup_bytes for report in own),
    )


def launch_table(sizes: Sequence[LaunchSize]) -> Table:
    """A row for each variant."""
    return Table(
        "Launches",
        ["kernel", "threads x registers", "of the budget", "threadgroup KB"],
        [
            [
                size.variant,
                f"{size.threads} x {size.registers}",
                f"{size.share:.2f}",
                f"{size.threadgroup_bytes / 1024:.1f}",
            ]
            for size in sizes
        ],
        "Of the self-checks' samples. Registers of a lane are estimated from the source; the "
        "budget is 448 threads x 110 registers and 16 KB, of the smallest chips. Above it "
        "compilers spill, since kernels are declared for their threads.",
    )
