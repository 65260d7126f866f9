"""Which format each tensor gets so that a size is met at the least cost. Knows no tensors.

Costs add up, so this is a knapsack with one choice per unit. Of each unit only the choices on the
lower convex hull of (bytes, cost) can be best at some price per byte; from the smallest on, the
step that buys the most for its bytes is taken, as long as it fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .read import MLXFormat


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to store a unit."""

    form: MLXFormat | None
    num_bytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that share one format, and what they may be stored as."""

    names: tuple[str, ...]
    choices: tuple[Choice, ...]


def allocate(units: Sequence[Unit], max_bytes: int) -> list[Choice]:
    """One choice for each unit, together at most `max_bytes`, which the smallest meet."""
    hulls = [lower_hull(unit.choices) for unit in units]
    taken = [0] * len(units)
    left = max_bytes - sum(hull[0].num_bytes for hull in hulls)
    assert left >= 0, "a target that nothing meets is refused before measuring"
    steps = [
        (_gain(hull[i], hull[i + 1]), unit, i + 1)
        for unit, hull in enumerate(hulls)
        for i in range(len(hull) - 1)
    ]
    for _, unit, step in sorted(steps, key=lambda s: (-s[0], s[1], s[2])):
        price = hulls[unit][step].num_bytes - hulls[unit][taken[unit]].num_bytes
        if price <= left:
            taken[unit], left = step, left - price
    return [hull[index] for hull, index in zip(hulls, taken, strict=True)]


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that are best at some price, by rising size and falling cost."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.num_bytes, c.cost)):
        if hull and choice.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(smaller: Choice, larger: Choice) -> float:
    """Cost that each byte more takes away."""
    return (smaller.cost - larger.cost) / max(1, larger.num_bytes - smaller.num_bytes)
