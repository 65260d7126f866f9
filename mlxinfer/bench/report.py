"""What a benchmark found, on which machine and by which command. Knows no engines."""

import os
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("mlxinfer", "mlx", "mlx-lm", "numpy")


@dataclass(frozen=True, slots=True)
class Table:
    """Strings in rows, for people."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(slots=True)
class Report:
    """Tables for people, plain data for programs."""

    benchmark: str
    tables: list[Table]
    data: dict[str, Any]
    machine: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"benchmark": self.benchmark, "machine": self.machine, **self.data}


def ratio(theirs: float, ours: float) -> str:
    """12.3 of theirs to 1 of ours -> "12.3x"."""
    if not ours > 0 or not theirs > 0:
        return "-"
    times = theirs / ours
    return (
        f"{times:.0f}x" if times >= 99.5 else f"{times:.1f}x" if times >= 9.95 else f"{times:.2f}x"
    )


def describe_machine(blas: str | None) -> dict[str, str]:
    """Facts that a number means nothing without."""
    return {
        "command": " ".join(["mlxinfer", *sys.argv[1:]]),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "blas": blas or "as MLX has it",
    }


def _processor() -> str:
    """The processor's name; what Python calls it where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
