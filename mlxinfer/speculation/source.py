"""What a source of proposals is."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from ..engine.batch import Batch, Sequence
from .acceptance import Key

Score = Callable[[Sequence, Key, bool], None]  # a proposal of this key was tried; whether it held


class Source(Protocol):
    """Proposes tokens. Its methods are called from the engine's thread."""

    name: str
    taps: Seq[int]  # layers of the model whose outputs it reads

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
        """A step is planned."""
        ...

    def take(self, batch: Batch, hidden: Any) -> None:
        """The outputs (T, n * hidden) of these n layers in a step that was read."""
        ...

    def outlook(self, sequence: Sequence, depth: int) -> list[Key]:
        """The keys of the proposals, `depth` at most, that it could make after tokens in flight."""
        ...

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        """Tokens that may follow what is known of each sequence, as many as its depth at most."""
        ...

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended: forget it."""
        ...

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what it holds."""
        ...
