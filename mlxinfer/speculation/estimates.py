"""What decides how many proposals pay: how likely they hold, and how long steps take. Measured.

Before anything was measured: what sources state of their proposals, and a published curve of times.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engine.batch import Sequence

Key = tuple[str, int]  # source, and what its proposals differ by: match length, or position

DECAY = 0.98  # of the weight of earlier trials, a trial: the last 50 count
SEQUENCE_DECAY = 0.9
PRIOR_WEIGHT = 4.0  # trials that the prior counts as
SEQUENCE_WEIGHT = 2.0
CERTAIN = 0.995


@dataclass(slots=True)
class Trials:
    """Proposals that held, of those tried; both decayed."""

    held: float
    tried: float

    def add(self, held: float, tried: float, decay: float) -> None:
        """Count one more trial, or what was expected of one."""
        self.held = self.held * decay + held
        self.tried = self.tried * decay + tried


class Acceptance:
    """Chances that the next proposal holds, given that those before it did.

    A chance is that of its key, over all sequences, times how much better or worse than expected
    the last proposals of the sequence were.

    Args:
        priors: chances by key before anything was measured.
    """

    def __init__(self, priors: Mapping[Key, float]) -> None:
        self._priors = priors
        self._by_key: dict[Key, Trials] = {}
        self._by_sequence: dict[Hashable, Trials] = {}

    def chance(self, sequence: Sequence, key: Key) -> float:
        """The chance of one proposal, in [0, 1)."""
        own = self._by_sequence.get(sequence)
        factor = 1.0
        if own is not None:
            factor = (own.held + SEQUENCE_WEIGHT) / (own.tried + SEQUENCE_WEIGHT)
        return min(self._of_key(key) * factor, CERTAIN)

    def observe(self, sequence: Sequence, key: Key, held: bool) -> None:
        """Count a proposal that was tried: those before it had held."""
        expected = self._of_key(key)
        own = self._by_sequence.setdefault(sequence, Trials(0.0, 0.0))
        own.add(float(held), expected, SEQUENCE_DECAY)
        trials = self._by_key.get(key)
        if trials is None:
            trials = self._by_key[key] = self._prior(key)
        trials.add(float(held), 1.0, DECAY)

    def renew(self, source: str) -> None:
        """Forget what was measured of a source, so that it is tried again."""
        for key in [key for key in self._by_key if key[0] == source]:
            del self._by_key[key]
        self._by_sequence.clear()

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._by_sequence.pop(sequence, None)

    def measured(self) -> dict[Key, float]:
        """Chances by key, of those that were tried."""
        return {key: self._of_key(key) for key in sorted(self._by_key)}

    def _of_key(self, key: Key) -> float:
        trials = self._by_key.get(key) or self._prior(key)
        return trials.held / trials.tried

    def _prior(self, key: Key) -> Trials:
        return Trials(self._priors[key] * PRIOR_WEIGHT, PRIOR_WEIGHT)


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
    """Batch sizes of steps that are measured together: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..."""
    if num_sequences <= 4:
        return num_sequences
    half = 1 << ((num_sequences - 1).bit_length() - 2)
    return -(-num_sequences // half) * half


class StepTimes:
    """Seconds of steps, by batch size and by rows beyond one a sequence.

    Between two numbers of rows that were measured, and beyond, rows cost the same each. Before any
    were measured with a batch size, a row costs what it does elsewhere; before anything was, times
    are relative to a step of one row, by the published curve.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], deque[float]] = {}

    def add(self, num_sequences: int, extra: int, seconds: float) -> None:
        """Count a step; without `extra` rows it is a plain one."""
        cell = bucket_of(num_sequences), _extra_bucket(extra)
        self._cells.setdefault(cell, deque(maxlen=KEPT)).append(seconds)

    def is_measured(self, num_sequences: int) -> bool:
        """Whether any steps with proposals were, with this batch size."""
        return any(self._measured(bucket_of(num_sequences)).keys() - {PLAIN})

    def seconds(self, num_sequences: int, extra: int) -> float:
        """What a step takes: as measured, or by the nearest ones that were."""
        return float(self.table(num_sequences, extra)[extra])

    def table(self, num_sequences: int, most: int) -> NDArray[np.float64]:
        """(most + 1,) seconds of steps with 0 to `most` rows more."""
        extra = np.arange(most + 1)
        known = self._measured(bucket_of(num_sequences))
        if PLAIN not in known:
            known[PLAIN] = self._plain_elsewhere(num_sequences)
        last = max(known)
        if last != PLAIN:
            each_s = max(known[last] - known[PLAIN], 0.0) / last
        else:
            elsewhere = self._row_elsewhere()
            if elsewhere is None:
                curve = np.array([relative_cost(num_sequences + i) for i in extra.tolist()])
                return known[PLAIN] * curve / curve[0]
            each_s = elsewhere
        rows = sorted(known)
        found = np.interp(extra, rows, [known[i] for i in rows])
        return found + each_s * np.maximum(extra - last, 0)

    def _measured(self, bucket: int) -> dict[int, float]:
        """Extra rows -> seconds, of a batch size.

        Fewer rows never take longer: where they seem to, the machine was busier then.
        """
        found, least_s = {}, np.inf
        cells = [(extra, times) for (size, extra), times in self._cells.items() if size == bucket]
        for extra, times in sorted(cells, key=lambda cell: -cell[0]):
            if len(times) >= FEWEST:
                found[extra] = least_s = min(_low_median(times), least_s)
        return found

    def _plain_elsewhere(self, num_sequences: int) -> float:
        """A plain step, by that of the nearest batch size and the curve."""
        plains = {
            size: _low_median(times)
            for (size, extra), times in self._cells.items()
            if extra == PLAIN and len(times) >= FEWEST
        }
        if not plains:
            return relative_cost(num_sequences)
        near = min(plains, key=lambda size: abs(size - num_sequences))
        return plains[near] * relative_cost(num_sequences) / relative_cost(near)

    def _row_elsewhere(self) -> float | None:
        """What a row more takes, from steps of the batch size that was measured most."""
        found: dict[int, float] = {}
        for size in {size for size, _ in self._cells}:
            known = self._measured(size)
            most = max(known, default=PLAIN)
            if most != PLAIN and PLAIN in known:
                found[most] = max(known[most] - known[PLAIN], 0.0) / most
        return found[max(found)] if found else None


def _low_median(times: deque[float]) -> float:
    """The lower one of two: a first step that compiles something counts for little."""
    return sorted(times)[(len(times) - 1) // 2]


def _extra_bucket(extra: int) -> int:
    return next((most for most in EXTRA if extra <= most), EXTRA[-1]) if extra else PLAIN
