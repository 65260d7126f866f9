"""How likely proposals are to hold, measured. Pure Python."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

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
        """Of one proposal, in [0, 1)."""
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
        """The sequence has ended."""
        self._by_sequence.pop(sequence, None)

    def measured(self) -> dict[Key, float]:
        """Chances by key, of those that were tried."""
        return {key: self._of_key(key) for key in sorted(self._by_key)}

    def _of_key(self, key: Key) -> float:
        trials = self._by_key.get(key) or self._prior(key)
        return trials.held / trials.tried

    def _prior(self, key: Key) -> Trials:
        return Trials(self._priors[key] * PRIOR_WEIGHT, PRIOR_WEIGHT)
