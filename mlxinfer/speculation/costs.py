"""How long steps take by sequences and rows: measured, and a published curve before that."""

from collections import deque
from statistics import median

# Seconds of a quantised matrix product with 1 to 8 rows over those with one: 5120 x 17408, 4 bits,
# groups of 64, in MLX (mini-sglang-mlx, README: 0.602 to 1.268 ms). The last slope goes on.
CURVE = (1.0, 0.98, 1.07, 1.26, 1.47, 1.69, 1.89, 2.11)
SLOPE = 0.21  # of each row beyond
KEPT = 9  # measurements of each cell, of which the median counts
FEWEST = 2
EXTRA = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PLAIN = 0  # extra rows of a step without proposals


def relative_cost(rows: int) -> float:
    """What a step of so many rows takes, in steps of one row."""
    if rows <= len(CURVE):
        return CURVE[max(rows, 1) - 1]
    return CURVE[-1] + SLOPE * (rows - len(CURVE))


def bucket_of(num_sequences: int) -> int:
    """Batch sizes whose steps are measured together: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..."""
    if num_sequences <= 4:
        return num_sequences
    half = 1 << ((num_sequences - 1).bit_length() - 2)
    return -(-num_sequences // half) * half


class StepTimes:
    """Seconds of steps, by batch size and by rows beyond one a sequence.

    Before anything was measured, times are relative to a step of one row.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], deque[float]] = {}

    def add(self, num_sequences: int, extra: int, seconds: float) -> None:
        """Count a step; without `extra` rows it is a plain one."""
        cell = bucket_of(num_sequences), _extra_bucket(extra)
        self._cells.setdefault(cell, deque(maxlen=KEPT)).append(seconds)

    def num_measured(self, num_sequences: int, extra: int) -> int:
        """Measurements of steps like this, as far as they are kept."""
        return len(self._cells.get((bucket_of(num_sequences), _extra_bucket(extra)), ()))

    def seconds(self, num_sequences: int, extra: int) -> float:
        """What a step takes: as measured, or by the curve from the nearest one measured."""
        bucket, wanted = bucket_of(num_sequences), _extra_bucket(extra)
        measured = {cell: m for cell, m in self._cells.items() if len(m) >= FEWEST}
        same = [cell for cell in measured if cell[0] == bucket] or list(measured)
        if not same:
            return relative_cost(num_sequences + extra)
        near = min(same, key=lambda cell: (abs(cell[0] - bucket), abs(cell[1] - wanted)))
        found = median(measured[near])
        if near == (bucket, wanted):
            return found
        return found * relative_cost(num_sequences + extra) / relative_cost(near[0] + near[1])


def _extra_bucket(extra: int) -> int:
    return next((most for most in EXTRA if extra <= most), EXTRA[-1]) if extra else PLAIN
