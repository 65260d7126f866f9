"""`bench start`: whole processes from launch to exit. Knows command lines; imports no engine."""

import tempfile

from mlxinfer import hub
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table
from tests.bench.processes import run_python
from tests.bench.tables import SIDES, Figures, medians, named, sides

BARE = ["-c", "pass"]
IMPORT = "import, less an empty Python"


def contests(folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """The same work on both sides, as arguments of Python."""
    ours, theirs, one = ["-m", "mlxinfer.cli"], ["-m", "mlx_lm"], ["--max-tokens", "1"]
    return {
        IMPORT: (["-c", "import mlxinfer"], ["-c", "import mlx_lm"]),
        "--help": ([*ours, "--help"], [*theirs, "--help"]),
        "model loaded, one token": (
            [*ours, "run", "-m", folder, *one, "Hello"],
            [*theirs, "generate", "--model", folder, *one, "--prompt", "Hello"],
        ),
    }


def run(*, model: str, runs: int, peer: bool) -> Report:
    """Every contest, `runs` times, the sides alternating."""
    if peer:
        require_peer()
    rows, processes, bare = [], [], Figures()
    for label, commands in contests(str(hub.resolve(model))).items():
        asked = [BARE, *commands] if peer else [BARE, commands[0]]
        with tempfile.TemporaryDirectory() as bytecode:
            bare, *costs = alternate(asked, runs, bytecode)
        if label == IMPORT:
            costs = [{name: cost[name] - bare[name] for name in cost} for cost in costs]
        processes.append({"what": label, **named(costs)})
        for kind, name in (("wall", "wall_s"), ("CPU", "cpu_s")):
            rows.append([label, kind, *sides([cost[name] * 1e3 for cost in costs])])
    table = Table(
        f"Milliseconds of whole processes, medians of {runs}, model {model}",
        ["", "", *SIDES],
        rows,
        "mlx-lm: import mlx_lm, mlx_lm --help, mlx_lm generate. MLX's own BLAS on both sides.",
    )
    return Report("start", [table], {"bare_python": bare, "processes": processes})


def alternate(commands: list[list[str]], runs: int, bytecode: str) -> list[Figures]:
    """The median cost of each command over `runs` rounds of all of them.

    Args:
        commands: arguments of Python.
        runs: rounds that count.
        bytecode: a folder where Python keeps what it compiled in the first round: its costs do
            not count: both sides start as packages that were installed and run before.
    """
    kept = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    rounds = [[run_python(*each, **kept).cost for each in commands] for _ in range(runs + 1)]
    return [medians(costs) for costs in zip(*rounds[1:], strict=True)]
