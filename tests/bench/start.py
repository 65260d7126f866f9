"""`bench start`: whole processes from launch to exit. Knows command lines; imports no engine."""

import statistics
import tempfile
from dataclasses import astuple, dataclass

from mlxinfer import hub
from mlxinfer.bench.peer import require_peer
from mlxinfer.bench.report import Report, Table
from tests.bench.processes import Ran, run_python
from tests.bench.tables import NAMES, SIDES, sides

PROMPT = "Hello"
Command = list[str]  # arguments of Python
BARE = ["-c", "pass"]


@dataclass(frozen=True, slots=True)
class Contest:
    """Commands of both sides. `bare`: the cost of an empty Python is subtracted."""

    label: str
    ours: Command
    theirs: Command
    bare: bool = False


def contests(folder: str) -> list[Contest]:
    """The same work on both sides."""
    ours, theirs = ["-m", "mlxinfer.cli"], ["-m", "mlx_lm"]
    one = ["--max-tokens", "1"]
    return [
        Contest(
            "import, less an empty Python",
            ["-c", "import mlxinfer"],
            ["-c", "import mlx_lm"],
            bare=True,
        ),
        Contest("--help", [*ours, "--help"], [*theirs, "--help"]),
        Contest(
            "model loaded, one token",
            [*ours, "run", "-m", folder, *one, PROMPT],
            [*theirs, "generate", "--model", folder, *one, "--prompt", PROMPT],
        ),
    ]


def median(costs: list[Ran]) -> Ran:
    """The median of each kind of cost."""
    return Ran(*(statistics.median(kind) for kind in zip(*map(astuple, costs), strict=True)))


def less(cost: Ran, base: Ran) -> Ran:
    """Return the cost of a process above that of another."""
    return Ran(cost.wall_s - base.wall_s, cost.cpu_s - base.cpu_s, cost.peak_bytes)


def run(*, model: str = "demo", runs: int = 7, peer: bool = True) -> Report:
    """Every contest, `runs` times, the sides alternating."""
    if peer:
        require_peer()
    folder = str(hub.resolve(model))
    found: list[tuple[Contest, list[Ran]]] = []
    for contest in contests(folder):
        commands = [BARE, contest.ours, *([contest.theirs] if peer else [])]
        with tempfile.TemporaryDirectory() as bytecode:
            bare, *costs = alternate(commands, runs, bytecode)
        found.append((contest, [less(cost, bare) for cost in costs] if contest.bare else costs))
    return Report("start", [_table(model, runs, found)], _data(bare, found))


def alternate(commands: list[Command], runs: int, bytecode: str) -> list[Ran]:
    """The median cost of each command over `runs` rounds of all of them.

    Args:
        bytecode: a folder where Python keeps what it compiled in the first round: its costs do
            not count: both sides start as packages that were installed and run before.
    """
    kept = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    costs: list[list[Ran]] = [[] for _ in commands]
    for turn in range(runs + 1):
        for command, cost in zip(commands, costs, strict=True):
            measured = run_python(*command, **kept)
            if turn:  # the first run of each fills the caches
                cost.append(measured)
    return [median(cost) for cost in costs]


def _table(model: str, runs: int, found: list[tuple[Contest, list[Ran]]]) -> Table:
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


def _data(bare: Ran, found: list[tuple[Contest, list[Ran]]]) -> dict[str, object]:
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
