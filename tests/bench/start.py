"""`bench start`: whole processes from launch to exit. Knows command lines; imports no engine."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from mlxinfer import hub
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table
from mlxinfer.errors import MlxinferError
from tests.bench.tables import NAMES, SIDES, sides

PROMPT = "Hello"
Command = list[str]
BARE = [sys.executable, "-c", "pass"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Contest:
    """Commands of both sides. `bare`: the cost of an empty Python is subtracted."""

    label: str
    ours: Command
    theirs: Command
    bare: bool = False


def contests(folder: str) -> list[Contest]:
    """The same work on both sides."""
    ours, theirs = [sys.executable, "-m", "mlxinfer.cli"], [sys.executable, "-m", "mlx_lm"]
    one = ["--max-tokens", "1"]
    return [
        Contest(
            "import, less an empty Python",
            [sys.executable, "-c", "import mlxinfer"],
            [sys.executable, "-c", "import mlx_lm"],
            bare=True,
        ),
        Contest("--help", [*ours, "--help"], [*theirs, "--help"]),
        Contest(
            "model loaded, one token",
            [*ours, "run", "-m", folder, *one, PROMPT],
            [*theirs, "generate", "--model", folder, *one, "--prompt", PROMPT],
        ),
    ]


def launch(command: Command, **environment: str) -> Cost:
    """Run a process to its end, with these variables beside those of this one.

    Raises:
        MlxinferError: it failed; the message has the end of what it wrote to stderr.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            tail = errors.read().decode(errors="replace").strip()[-600:]
            raise MlxinferError(f"{' '.join(command)} exited with {process.returncode}: {tail}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime)


def median(costs: list[Cost]) -> Cost:
    """Of wall and CPU seconds apart."""
    return Cost(
        statistics.median(c.wall_s for c in costs), statistics.median(c.cpu_s for c in costs)
    )


def less(cost: Cost, base: Cost) -> Cost:
    """Return the cost of a process above that of another."""
    return Cost(cost.wall_s - base.wall_s, cost.cpu_s - base.cpu_s)


def run(*, model: str = "demo", runs: int = 7, peer: bool = True) -> Report:
    """Every contest, `runs` times, the sides alternating."""
    if peer:
        require_peer()
    folder = str(hub.resolve(model))
    found: list[tuple[Contest, list[Cost]]] = []
    for contest in contests(folder):
        commands = [BARE, contest.ours, *([contest.theirs] if peer else [])]
        with tempfile.TemporaryDirectory() as bytecode:
            bare, *costs = alternate(commands, runs, bytecode)
        found.append((contest, [less(cost, bare) for cost in costs] if contest.bare else costs))
    return Report("start", [_table(model, runs, found)], _data(bare, found))


def alternate(commands: list[Command], runs: int, bytecode: str) -> list[Cost]:
    """The median cost of each command over `runs` rounds of all of them.

    Args:
        bytecode: a folder where Python keeps what it compiled in the first round: its costs do
            not count: both sides start as packages that were installed and run before.
    """
    kept = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    costs: list[list[Cost]] = [[] for _ in commands]
    for turn in range(runs + 1):
        for command, cost in zip(commands, costs, strict=True):
            measured = launch(command, **kept)
            if turn:  # the first run of each fills the caches
                cost.append(measured)
    return [median(cost) for cost in costs]


def _table(model: str, runs: int, found: list[tuple[Contest, list[Cost]]]) -> Table:
    rows = []
    for contest, costs in found:
        for kind in ("wall", "CPU"):
            values = [cost.wall_s if kind == "wall" else cost.cpu_s for cost in costs]
            rows.append([contest.label, kind, *sides([value * 1e3 for value in values])])
    return Table(
        f"Milliseconds of whole processes, medians of {runs}, model {model}",
        ["", "", *SIDES],
        rows,
        "mlx-lm: import mlx_lm, mlx_lm --help, mlx_lm generate. MLX's own BLAS on both sides.",
    )


def _data(bare: Cost, found: list[tuple[Contest, list[Cost]]]) -> dict[str, object]:
    return {
        "bare_python": {"wall_s": bare.wall_s, "cpu_s": bare.cpu_s},
        "processes": [
            {
                "what": contest.label,
                **{
                    name: {"wall_s": cost.wall_s, "cpu_s": cost.cpu_s}
                    for name, cost in zip(NAMES, costs, strict=False)
                },
            }
            for contest, costs in found
        ],
    }
