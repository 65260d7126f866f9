"""Forced tokens: where a grammar leaves one way to go on, that is proposed (jump-forward)."""

from collections.abc import Sequence as Seq
from typing import Any

from ..engine.batch import Batch, Sequence
from .acceptance import Key

NAME = "forced"
CERTAINTY = 0.99


class ForcedProposer:
    """Proposes what grammars say must come.

    A grammar forces text; the model may spell it with other tokens, so the proposals are verified
    like any others.
    """

    name = NAME
    taps: Seq[int] = ()
    is_free = False
    cost = 0.0

    def __init__(self) -> None:
        self._found: dict[Sequence, tuple[int, list[int]]] = {}  # tokens known then; tokens forced

    @property
    def priors(self) -> dict[Key, float]:
        """Almost certain."""
        return {(NAME, 0): CERTAINTY}

    def begin_step(self) -> None:
        """Nothing to do."""

    def take(self, batch: Batch, hidden: Any) -> None:
        """It reads no hidden states."""

    def outlook(self, sequence: Sequence, depth: int) -> list[Key]:
        """As many as are forced after the tokens in flight."""
        count = len(self._forced(sequence)) - sequence.num_pending
        return [(NAME, 0)] * max(min(count, depth), 0)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        """The forced tokens."""
        return [self._forced(s)[:depth] for s, depth in zip(sequences, depths, strict=True)]

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._found.pop(sequence, None)

    def stats(self) -> dict[str, Any]:
        """It holds nothing."""
        return {}

    def _forced(self, sequence: Sequence) -> list[int]:
        """Tokens that must come after those known; worked out once for each place."""
        grammar = sequence.request.grammar
        if grammar is None or sequence.finished:
            return []
        known = sequence.num_known
        place, forced = self._found.get(sequence, (-1, []))
        if place != known:
            forced = grammar.forced()
            self._found[sequence] = known, forced
        return forced
