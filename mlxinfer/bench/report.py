"""The result of a benchmark, with the machine and the command. Knows no engines."""

import json
import os
import platform
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
        return {"benchmark": self.benchmark, "machine": self.machine, **self.data}


def ratio(theirs: float, ours: float) -> str:
    """12.3 of theirs to 1 of ours -> "12.3x"."""
    if not ours > 0 or not theirs > 0:
        return "-"
    times = theirs / ours
    return (
        f"{times:.0f}x" if times >= 99.5 else f"{times:.1f}x" if times >= 9.95 else f"{times:.2f}x"
    )


def describe_machine(command: str, **facts: str) -> dict[str, str]:
    """Facts that a number means nothing without.

    Args:
        facts: more of them, by name.
    """
    return {
        "command": command,
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "load": ", ".join(f"{load:.1f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        **facts,
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


# -- how it is shown --------------------------------------------------------------------------


def show(report: Report, *, as_json: bool = False, as_markdown: bool = False) -> None:
    if as_json:
        print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    elif as_markdown:
        print(markdown(report))
    else:
        _print_tables(report)


def markdown(report: Report) -> str:
    parts = [_markdown_table(table) for table in report.tables]
    facts = "; ".join(f"{name}: {fact}" for name, fact in report.machine.items())
    return "\n\n".join([*parts, *([f"*{facts}*"] if facts else [])])


def _markdown_table(table: Table) -> str:
    """Title, rows and note; the first column left, numbers right."""
    rules = [":--", *["--:"] * (len(table.columns) - 1)]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in (table.columns, rules, *escaped)]
    parts = [f"**{table.title}**", "\n".join(lines), *([table.note] if table.note else [])]
    return "\n\n".join(parts)


def _print_tables(report: Report) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(highlight=False)
    for name, fact in report.machine.items():
        console.print(f"[dim]{name:9}[/dim]{fact}", markup=True, soft_wrap=True)
    for table in report.tables:
        grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for index, column in enumerate(table.columns):
            grid.add_column(column, justify="left" if index == 0 else "right")
        for row in table.rows:
            grid.add_row(*row)
        console.print(f"\n{table.title}", grid, sep="\n", markup=False)
        if table.note:
            console.print(table.note, style="dim", markup=False)
