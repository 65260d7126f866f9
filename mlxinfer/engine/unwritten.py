"""Steps of a batch that nobody joins or leaves, before its sequences know. Knows no pages.

Such a step does the same to all of them: a position more is computed, a token is read. It is noted
once for all, and written to each when somebody looks at one of them, or after MAX_STEPS.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from .sequence import Sequence

MAX_STEPS = 16


@dataclass(slots=True)
class Unwritten:
    """What B decoding sequences do not know of their last steps."""

    sequences: list[Sequence]  # (B,) told from another batch's by the list, not by what is in it
    num_in_flight: int = 0  # steps that were launched and not read
    num_launched: int = 0  # steps that the sequences do not know to be launched
    token_ids: list[Seq[int]] = field(default_factory=list)  # (B,) of each step that was read

    def launched(self) -> None:
        """A step computes their newest token and samples one more."""
        self.num_in_flight += 1
        self.num_launched += 1

    def read(self, token_ids: Seq[int]) -> None:
        """The tokens (B,) that the first step in flight sampled.

        Where no step is in flight after it, the next one starts from what the sequences know.
        """
        assert len(token_ids) == len(self.sequences)
        self.num_in_flight -= 1
        self.token_ids.append(token_ids)
        if not self.num_in_flight or len(self.token_ids) >= MAX_STEPS:
            self.write()

    def read_one_by_one(self) -> None:
        """The first step in flight is being read, and its tokens are told by who reads them."""
        self.num_in_flight -= 1
        self.write()

    def write(self) -> None:
        """Tell them."""
        num_launched, steps = self.num_launched, self.token_ids
        if num_launched == len(steps) == 0:
            return
        self.num_launched, self.token_ids = 0, []  # first: a fault must not come again and again
        answers = zip(*steps, strict=True) if steps else [()] * len(self.sequences)
        for sequence, token_ids in zip(self.sequences, answers, strict=True):
            sequence.num_computed += num_launched
            sequence.num_pending += num_launched - len(steps)
            sequence.token_ids.extend(token_ids)
