"""What the scheduler hands to the runner: which tokens of which sequences make up the next step."""

from dataclasses import dataclass, field

from ..cache.pages import PageTable
from .sequence import Sequence

MAX_SHORT = 8  # query tokens that the decode path takes; longer segments are prefill


@dataclass(slots=True)
class Segment:
    """Consecutive new tokens of one sequence; what the KV cache calls a Span, and what to do."""

    sequence: Sequence
    start: int  # position of the first
    num_tokens: int
    sealed: int  # positions in pages before this step; the tail starts here
    slot: int  # of the tail
    tables: list[PageTable]  # one per layer group
    samples: bool  # whether the last one's logits give the next token
    output_index: int  # which token of the answer is sampled, from 0
    seals: bool = False  # written to pages (a prefill chunk), not to the tail alone
    row: int = 0  # of the first token in the flat list

    @property
    def stop(self) -> int:
        """One past the position of the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Move:
    """Tail tokens to be written to pages before a step: positions [start, stop)."""

    tables: list[PageTable]  # where to
    slot: int  # of the tail
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Tokens of a shared page to be copied, before a step, into a page and a tail of one's own."""

    sequence: Sequence
    start: int  # position of the page's first token
    stop: int  # one past the last that is copied
    pages: list[int | None]  # by group: the shared page; None: nothing of it is visible


@dataclass(frozen=True, slots=True)
class Spill:
    """A page that was evicted, to be read before the step writes over it."""

    group: int
    page: int
    key: bytes  # what it is stored under
    parent: bytes
    token_ids: tuple[int, ...]  # of this page alone


@dataclass(frozen=True, slots=True)
class Load:
    """Stored bytes to be written to a page before a step."""

    group: int
    page: int
    payload: memoryview


@dataclass(slots=True)
class Batch:
    """One step: short segments first, single tokens before others, then prefill chunks."""

    short: list[Segment]
    long: list[Segment] = field(default_factory=list)
    seal: list[Move] = field(default_factory=list)
    spill: list[Spill] = field(default_factory=list)
    load: list[Load] = field(default_factory=list)
    restore: list[Restore] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # took their slot for this step
    sampling: list[Segment] = field(default_factory=list)  # those that get a token: flat order, but
    num_guided: int = 0  # ... that many, which are under a grammar, come last
    num_tokens: int = 0  # rows of the forward pass

    @property
    def segments(self) -> list[Segment]:
        """All, in flat order."""
        return self.short + self.long if self.long else self.short

    @property
    def guided(self) -> list[Segment]:
        """Those that get a token under a grammar."""
        return self.sampling[len(self.sampling) - self.num_guided :]

    @property
    def writes_pages(self) -> bool:
        """Whether the step writes the pool or reads it out, and so must wait for the one in flight.

        Before the step proper come, in this order: seal, spill, load, restore.
        """
        return bool(self.long or self.seal or self.restore or self.spill or self.load)
