"""What the scheduler hands to the runner: which tokens of which sequences make up the next step."""

from dataclasses import dataclass, field

from .sequence import Sequence

MAX_SHORT = 8  # query tokens that the decode path takes; longer segments are prefill


@dataclass(slots=True)
class Segment:
    """Consecutive new tokens of one sequence."""

    sequence: Sequence
    start: int  # position of the first
    num_tokens: int
    samples: bool  # whether the last one's logits give the next token
    sealed: int  # positions in pages before this step; the tail starts here
    seals: bool  # written to pages (a prefill chunk), not to the tail alone
    output_index: int = 0  # which token of the answer is sampled, from 0

    @property
    def stop(self) -> int:
        """One past the position of the last token."""
        return self.start + self.num_tokens


@dataclass(slots=True)
class Batch:
    """One step: short segments first, then prefill chunks."""

    segments: list[Segment]
    seal: list[tuple[Sequence, int, int]] = field(default_factory=list)
    # tail -> pages before the step: (sequence, from, to), positions at page boundaries
    admitted: list[Sequence] = field(default_factory=list)  # took their slot for this step
    sampling: list[Sequence] = field(default_factory=list)  # those that get a token, in flat order

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def writes_pages(self) -> bool:
        """Whether the step writes the pool, and so must wait for the one in flight."""
        return bool(self.seal) or any(segment.seals for segment in self.segments)
