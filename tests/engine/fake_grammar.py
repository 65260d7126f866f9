"""A grammar made of arithmetic: which tokens may come next follows from the sum of those before."""

from collections.abc import Sequence
from copy import copy

import numpy as np

VOCAB = 96


class FakeGrammar:
    """Allows about a third of the vocabulary, another third after each token.

    Args:
        seed: two grammars of one seed allow the same.
        accepting_every: it may end after each so many tokens; 0: nowhere.
        length: it is finished after so many tokens; None: never.
        stuck_at: it allows nothing after so many tokens.
        trouble_at: it has a problem after so many tokens.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        accepting_every: int = 0,
        length: int | None = None,
        stuck_at: int | None = None,
        trouble_at: int | None = None,
    ) -> None:
        self.seed, self.accepting_every, self.length = seed, accepting_every, length
        self.stuck_at, self.trouble_at = stuck_at, trouble_at
        self.place = "fake"
        self.taken: list[int] = []
        self.problem: str | None = None
        self.num_masks = 0
        self.is_fork = False

    @property
    def finished(self) -> bool:
        return len(self.taken) == self.length

    @property
    def accepting(self) -> bool:
        every = self.accepting_every
        return self.finished or bool(every and len(self.taken) % every == 0)

    def allowed(self, vocab: int = VOCAB) -> list[int]:
        """The tokens that may come next."""
        if len(self.taken) == self.stuck_at:
            return []
        state = hash((self.seed, sum(self.taken), len(self.taken)))
        return [token for token in range(vocab) if hash((state, token)) % 3 == 0]

    def forced(self) -> list[int]:
        """Half of the time what is not forced at all: nothing may come of it."""
        allowed = [] if self.finished or self.problem else self.allowed()
        return allowed[:1] * (len(self.taken) % 2)

    def fork(self) -> "FakeGrammar":
        """May be offered anything; what is not allowed is a problem, as with a real grammar."""
        other = copy(self)
        other.taken, other.is_fork = list(self.taken), True
        return other

    def accept(self, token_id: int) -> None:
        assert not self.finished, "a token after the end"
        if self.is_fork and token_id not in self.allowed():
            self.problem = "not allowed"
            return
        assert token_id in self.allowed(), f"{token_id} was not allowed"
        self.taken.append(token_id)
        if len(self.taken) == self.trouble_at:
            self.problem = "it is too hard"

    @staticmethod
    def fill_masks(
        grammars: Sequence["FakeGrammar"], rows: Sequence[int], masks: np.ndarray
    ) -> None:
        for grammar, row in zip(grammars, rows, strict=True):
            assert not grammar.finished
            grammar.num_masks += 1
            bits = np.zeros(masks.shape[1] * 32, dtype=np.uint8)
            bits[grammar.allowed()] = 1
            masks[row] = np.packbits(bits, bitorder="little").view(np.uint32)
