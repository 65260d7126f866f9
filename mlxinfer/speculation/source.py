"""The interface of a source of proposals."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from ..engine.batch import Batch, Proposal, Sequence
from .controller import Key

Score = Callable[[Sequence, Key, bool], None]  # a proposal of this key was tried; whether it held


class Source(ABC):
    """Proposes tokens. Its methods are called from the engine's thread.

    Attributes:
        name: of the source, in keys and statistics.
        taps: layers of the model whose outputs it reads.
        is_free: it scores its guesses itself as tokens come, whether they were verified or not.
        cost: of a proposal, in plain steps, before that was measured; 0: nothing.
        priors: how likely a proposal of each key is to hold, before any was tried.
        score: takes what became of a guess, from a source that is free.
    """

    name: str
    taps: Seq[int] = ()
    is_free: bool = False
    cost: float = 0.0
    priors: Mapping[Key, float]
    score: Score

    @abstractmethod
    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        """The keys of the proposals that it could make after the tokens in flight.

        At most `depth` for each sequence. A sequence without any is left out.
        """

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        """Tokens that may follow the known ones of each sequence, at most as many as its depth."""

    def take(self, batch: Batch, hidden: Any) -> None:
        """Read the outputs (T, n * hidden) of the n layers of `taps` in a step that was read."""
        assert not self.taps, "a source that reads layers takes their outputs"

    @abstractmethod
    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what it holds."""
        return {}
