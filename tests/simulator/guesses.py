"""A proposer that knows the answers, and says them right, wrong and half-right at random."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from simulator.oracle import Oracle

from mlxinfer.engine.batch import Proposal, Sequence
from mlxinfer.engine.scheduler import Proposer


class Guesses(Proposer):
    """Proposals from the oracles of a simulation.

    Args:
        seed: of what is drawn, apart from everything else in a program.
        oracle_of: the oracle of a request.
    """

    def __init__(self, seed: int, oracle_of: Callable[[str], Oracle]) -> None:
        self._rng = random.Random(f"proposals {seed}")
        self._oracle_of = oracle_of
        self._rests = self._rng.choice([0.0, 0.3, 0.8])  # of the turns

    def depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        return 0 if self._rng.random() < self._rests else self._rng.choice([1, 2, 5, 9])

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        return [Proposal(self._guess(sequence, depth)) for sequence in sequences]

    def _guess(self, sequence: Sequence, depth: int) -> list[int]:
        """Some right tokens, then some that may be wrong; now and then more than was asked for."""
        rng, oracle = self._rng, self._oracle_of(sequence.request.id)
        start, num_right = sequence.num_known, rng.choice([0, depth, rng.randint(0, depth)])
        right = [oracle.token(start + i) for i in range(num_right)]
        return right + [rng.randrange(4) for _ in range(rng.choice([0, 0, 1, depth]))]
