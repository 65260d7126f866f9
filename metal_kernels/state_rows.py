"""Where kernels find the states of recurrent layers: rows of a few arrays, addressed by index.

B = sequences, L = tokens that each brings to a step. A step leaves the states of its sequences in
one array, and the next step may have others of them, in another order, beside some that begin. So a
kernel gets `SOURCES` arrays as they are, and a plan: array and row of each sequence's state, and
how many of its L tokens count. Nothing is gathered before it, and nothing scattered behind.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .launch import MIN_NUMBERS

SOURCES = 4  # arrays
PLAN = 3  # numbers of a sequence in the plan: source, row (-1: zeros), tokens that count
LANES = 32
MAX_PER_LANE = 16  # numbers of a state row that a lane holds, where the row allows it
WIDEST_PER_LANE = 32
NAMES = tuple(f"source_{i}" for i in range(SOURCES))
INPUTS = ("plan", *NAMES)  # of every such kernel, at the end
ARRAYS = ", ".join(NAMES)  # in the call of `state_at`
FILES = ("state_rows.h", "state_rows.py")  # what verdicts about such kernels depend on

Place = tuple[int, int]  # source and row


def plan_of(places: Sequence[Place], counts: Sequence[int]) -> mx.array:
    """(max(B, 3), 3) int32: longer than what MLX would pass in another address space.

    Args:
        places: (B,) of the state before the step; row -1: zeros.
        counts: (B,) tokens that count.
    """
    rows = [[*place, count] for place, count in zip(places, counts, strict=True)]
    rows += [[0, -1, 0]] * (-(-MIN_NUMBERS // PLAN) - len(rows))
    return mx.array(np.array(rows, dtype=np.int32))


def filled(arrays: Sequence[mx.array]) -> list[mx.array]:
    """`SOURCES` arrays: the first stands for those that are missing."""
    assert 0 < len(arrays) <= SOURCES, len(arrays)
    return [*arrays, *[arrays[0]] * (SOURCES - len(arrays))]


def gathered(sources: Sequence[mx.array], plan: mx.array, count: int) -> mx.array:
    """The states (B, ...) that a plan for B sequences names, in plain MLX."""
    found = []
    for source, row, _ in np.array(plan)[:count].tolist():
        zeros = mx.zeros((1, *sources[0].shape[1:]), sources[0].dtype)
        found.append(zeros if row < 0 else sources[source][row : row + 1])
    return mx.concatenate(found)


def lengths_of(plan: mx.array, count: int) -> mx.array:
    """(B,) tokens that count."""
    return plan[:count, 2]


def team_lanes(width: int) -> int | None:
    """Lanes that share a row of `width` numbers, four neighbours a load; None: no such number."""
    teams = [lanes for lanes in (1, 2, 4, 8, 16, 32) if width % (4 * lanes) == 0]
    for lanes in teams:
        if width // lanes <= MAX_PER_LANE:
            return lanes
    return teams[-1] if teams and width // teams[-1] <= WIDEST_PER_LANE else None


def takes(rows: int, width: int) -> bool:
    """Whether a matrix (rows, width) is divided into whole SIMD-groups."""
    lanes = team_lanes(width)
    return lanes is not None and rows * lanes % LANES == 0
