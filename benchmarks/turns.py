"""Both sides in turn: pairs of figures, their medians and their spread.

The machine's slow minutes count for both sides then. Times are CPU seconds of the process, which
do not count waiting for others; a core that others share still slows caches and memory down, so a
ratio is a median over pairs, and its spread stands beside it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.tables import NAMES, Figures
from mlxinfer.bench.report import ratio

COLUMNS = [*NAMES, "ratio", "spread of the ratio"]
Measure = Callable[[int], Figures]  # of a turn: figures of one side, by what they are of


def in_turn(
    sides: Mapping[str, Measure], turns: int, *, warm: bool = True
) -> dict[str, list[Figures]]:
    """Measure every side once in each turn; odd turns begin with the last side.

    Args:
        sides: measures by the name of their side.
        turns: how many pairs.
        warm: measure each once more before, which loads and compiles and does not count.
    """
    by_name: dict[str, list[Figures]] = {side: [] for side in sides}
    if warm:
        for measure in sides.values():
            measure(-1)
    for turn in range(turns):
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            by_name[side].append(sides[side](turn))
    return by_name


def cells(
    figures: Mapping[str, Sequence[Figures]], name: str, form: str = ",.0f", *, higher: bool = True
) -> list[str]:
    """Return the cells of a row: both medians, the median ratio of the pairs, and its range.

    Args:
        found: as `in_turn` returns it.
        name: of the figure.
        form: how a value is written.
        higher: whether a higher value is better.
    """
    sides = [[run[name] for run in runs] for runs in figures.values()]
    middles = [format(statistics.median(values), form) for values in sides]
    if len(sides) == 1:
        low, high = min(sides[0]), max(sides[0])
        return [*middles, "-", "-", f"{low:{form}} to {high:{form}}"]
    ratios = [a / b if higher else b / a for a, b in zip(*sides, strict=True)]
    middle, *ends = [ratio(r, 1.0) for r in (statistics.median(ratios), min(ratios), max(ratios))]
    return [*middles, middle, " to ".join(ends)]
