"""A proposer that knows the answers, and says them right, wrong and half-right at random."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.proposals import Proposal, Proposer


class Oracle(Proposer):
    """Proposals from the plain run's tokens.

    Args:
        answers: by request id.
        seed: of what is drawn.
        vocab: tokens that a wrong proposal is drawn from.
    """

    def __init__(self, answers: Mapping[str, Seq[int]], seed: int, *, vocab: int = 96) -> None:
        self._answers, self._vocab = answers, vocab
        self._rng = random.Random(seed)
        self._rests = self._rng.choice([0.0, 0.3, 0.8])  # of the steps

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        return 0 if self._rng.random() < self._rests else self._rng.choice([1, 2, 4, 7, 9])

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        assert not any(sequence.num_pending for sequence in sequences), "its newest token is unread"
        return [Proposal(self._guess(sequence, depth)) for sequence in sequences]

    def _guess(self, sequence: Sequence, depth: int) -> list[int]:
        """Some right tokens, then some that may be wrong; now and then more than was asked for."""
        rng, answer = self._rng, self._answers[sequence.request.id]
        start, num_right = sequence.num_answered, rng.choice([0, depth, rng.randint(0, depth)])
        wrong = [rng.randrange(self._vocab) for _ in range(rng.choice([0, 0, 1, depth]))]
        return [*answer[start : start + num_right], *wrong]
