"""What a source of proposals is; and the simplest, which every request has: forced tokens."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from ..engine.batch import Batch, Proposal, Sequence
from .estimates import Key

FORCED = "forced"  # the name of `ForcedProposer`
CERTAINTY = 0.99  # that what a grammar forces holds

Score = Callable[[Sequence, Key, bool], None]  # a proposal of this key was tried; whether it held


class Source(Protocol):
    """Proposes tokens. Its methods are called from the engine's thread."""

    name: str
    taps: Seq[int]  # layers of the model that it reads the outputs of

    @property
    def priors(self) -> dict[Key, float]:
        """How likely a proposal of each key is to hold before any was tried."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether it scores its guesses itself as tokens come, verified or not."""
        ...

    @property
    def cost(self) -> float:
        """What a proposal takes, in plain steps, before that was measured; 0: nothing."""
        ...

    def begin_step(self) -> None:
        """A step is being planned; called before `outlook`."""
        ...

    def take(self, batch: Batch, hidden: Any) -> None:
        """The outputs (T, n * hidden) of these n layers in a step that was read."""
        ...

    def outlook(self, sequence: Sequence, depth: int) -> list[Key]:
        """The keys of the proposals, `depth` at most, that it could make after tokens in flight."""
        ...

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        """Tokens that may follow what is known of each sequence, as many as its depth at most."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended: forget it."""
        ...

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what it holds."""
        ...


class ForcedProposer:
    """Proposes what grammars say must come.

    A grammar forces text; the model may spell it with other tokens, so the proposals are verified
    like any others.
    """

    name = FORCED
    taps: Seq[int] = ()
    is_free = False
    cost = 0.0

    def __init__(self) -> None:
        self._found: dict[Sequence, tuple[int, list[int]]] = {}  # tokens known then; tokens forced

    @property
    def priors(self) -> dict[Key, float]:
        """Forced tokens hold almost certainly."""
        return {(FORCED, 0): CERTAINTY}

    def begin_step(self) -> None:
        """Nothing to do."""

    def take(self, batch: Batch, hidden: Any) -> None:
        """It reads no hidden states."""

    def outlook(self, sequence: Sequence, depth: int) -> list[Key]:
        """Keys of as many proposals as are forced after the tokens in flight."""
        count = len(self._forced(sequence)) - sequence.num_pending
        return [(FORCED, 0)] * max(min(count, depth), 0)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        """The forced tokens."""
        return [Proposal(self._forced(s)[:n]) for s, n in zip(sequences, depths, strict=True)]

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
