"""Proposed tokens: who makes them, and which of them hold. No MLX."""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol

from .batch import Batch, CommitResult, Proposals, Sequence


class Proposal(NamedTuple):
    """Tokens that may come next in a sequence, and how they were drawn."""

    token_ids: Seq[int]
    weights: Seq[Any] = ()  # (n,) arrays that the tokens were drawn with, for rejection sampling

    def cut(self, count: int) -> "Proposal":
        return Proposal(self.token_ids[:count], self.weights[:count])


class Proposer(Protocol):
    """Proposes the next tokens of sequences, so that one step verifies several tokens of each.

    Proposals change how many steps an answer takes, and never its tokens.

    Attributes:
        taps: layers whose outputs the proposer reads, see `layers.step.Taps`.
    """

    taps: Seq[int] = ()

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """Choose how many tokens to propose per sequence in the next step, at most.

        0: no proposals; then the next step is launched while this one runs. Otherwise the step in
        flight is read first, unless micro-batches take turns.
        """

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        """Up to `depth` tokens for each sequence that may follow its `token_ids`."""

    def take(self, batch: Batch, hidden: Any) -> None:
        """Read the outputs (T, n * hidden) of the n layers of `taps`, before `observe`."""

    def observe(self, batch: Batch, result: CommitResult) -> None:
        """Learn from a step that was read, with or without proposals."""

    def stats(self) -> dict[str, Any]:
        return {}


def accepted_rows(proposals: Proposals, token_ids: Seq[int]) -> list[bool]:
    """Which of the R sampled tokens the plain run samples too.

    A token counts if all proposals before it came true. This is exact: a token follows from its
    row's logits, seed and index, so it is the token of the plain run as long as the tokens
    before it are.
    """
    is_accepted: list[bool] = []
    for row, count in enumerate(proposals.counts.tolist()):
        holds = count == 0 or (
            is_accepted[-1]
            and row not in proposals.blocked
            and token_ids[row - 1] == proposals.token_ids[row, count - 1]
        )
        is_accepted.append(holds)
    return is_accepted
