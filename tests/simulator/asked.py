"""One request of a simulation: what it must get, and what it got. Knows no pages."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from simulator.oracle import Oracle

from mlxinfer.core import FinishReason, Request
from mlxinfer.engine.batch import Sequence


@dataclass
class Asked:
    """A request and its oracle; asserts that it gets the oracle's tokens, once, to the end."""

    request: Request
    sequence: Sequence
    oracle: Oracle
    expected: list[int]
    expected_reason: FinishReason
    got: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far; the ids of pictures where features stand."""
        return self.sequence.key_ids[: self.sequence.num_prompt] + self.got

    def take(self, token: int, reason: FinishReason | None) -> None:
        """A token came, the last one with a reason."""
        self.got.append(token)
        count = len(self.got)
        assert self.got[-1:] == self.expected[count - 1 : count], self.request.id
        assert (reason is None) == (count < len(self.expected))
        if reason is not None:
            assert reason is self.expected_reason
            self.end(reason)

    def end(self, reason: FinishReason) -> None:
        assert self.reason is None, f"{self.request.id} ends twice"
        self.reason = reason

    def check_hidden(self, position: int, hidden: int) -> None:
        """What a step gave at a position."""
        assert hidden == self.oracle.hidden(position), (
            f"{self.request.id} sees wrong keys at position {position}; its prompt ends at "
            f"{len(self.request.prompt_ids)}"
        )

    def check_cached(self, all_asked: Iterable["Asked"], *, reuse: bool) -> None:
        """Tokens count as cached only where another request computed the same ones."""
        num_cached = self.sequence.num_cached
        if not num_cached:
            return
        assert reuse
        assert not self.request.prompt_logits
        assert num_cached <= len(self.request.prompt_ids)
        if not self.sequence.num_preempted:
            others = (a.tokens for a in all_asked if a is not self)
            reusable = self.tokens[: self.sequence.num_prompt - 1]
            assert num_cached <= max(common(reusable, o) for o in others)
        spans = self.sequence.pictures.spans if self.sequence.pictures else []
        assert not any(start < num_cached < stop for start, stop in spans)


def common(a: Seq[int], b: Seq[int]) -> int:
    """How many tokens two lists share at their beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
