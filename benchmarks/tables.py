"""Figures of mlxinfer and of mlx-lm: medians, and cells that compare the two."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mlxinfer.bench.report import ratio

Figures = dict[str, float]  # of one run, by what they are of

NAMES = ("mlxinfer", "mlx-lm")
SIDES = [*NAMES, "ratio"]


def medians(runs: Sequence[Mapping[str, float]]) -> Figures:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def sides(values: Sequence[float], form: str = ",.0f", *, higher: bool = False) -> list[str]:
    """Return the cells of our value, mlx-lm's, and how many times better ours is.

    Args:
        values: ours, and mlx-lm's where it was measured.
        form: how a value is written.
        higher: whether a higher value is better.
    """
    cells = [format(value, form) for value in values]
    if len(values) == 1:
        return [*cells, "-", "-"]
    ours, theirs = values
    return [*cells, ratio(ours, theirs) if higher else ratio(theirs, ours)]


def named(figures: Sequence[Any]) -> dict[str, Any]:
    """Return values by the name of their side."""
    return dict(zip(NAMES, figures, strict=False))
