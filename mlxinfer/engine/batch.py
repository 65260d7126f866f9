"""What the scheduler hands to the runner: which tokens of which sequences make up the next step."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..cache.page_table import PageTable
from ..cache.sealing import Move
from ..cache.segments import Ints, StepSegments, ints
from .decodes import DecodeBatch
from .sequence import EventFields, Sequence

MAX_SHORT = 8  # query tokens that the decode path takes; longer segments are prefill


@dataclass(slots=True)
class Segment:
    """Consecutive new tokens of one sequence: a `QuerySegment` of the KV cache, its sampling."""

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
class PartialCopy:
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


@dataclass(frozen=True, slots=True)
class Sampling:
    """Who gets a token in a step: first those that are free to take any, then those constrained."""

    sequences: list[Sequence]  # (R,)
    event_fields: EventFields  # of them
    slots: tuple[int, ...]  # (R,)
    slot_ids: Ints  # (R,) the same
    output_index: NDArray[np.int64]  # (R,) which token of each answer it is, from 0
    rows: Ints | None  # (R,) flat rows whose logits give it; None: all of the step's, in order
    num_constrained: int = 0  # the last so many are under a grammar

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_free(self) -> int:
        """How many are not under a grammar."""
        return len(self.sequences) - self.num_constrained

    @property
    def constrained(self) -> list[Sequence]:
        """Those under a grammar."""
        return self.sequences[self.num_free :]


NOBODY = Sampling(
    [],
    EventFields([], [], frozenset()),
    (),
    np.zeros(0, dtype=np.int32),
    np.zeros(0, dtype=np.int64),
    None,
)


def sampling_of(decodes: DecodeBatch, prefills: list[Segment]) -> Sampling:
    """Who gets a token: all that decode, and the prompts that end in this step."""
    ends = [segment for segment in prefills if segment.samples]
    sequences = decodes.sequences + [s.sequence for s in ends] if ends else decodes.sequences
    rows, slots, output_index = None, decodes.slots, decodes.output_index
    event_fields, slot_ids = decodes.event_fields, decodes.spans.slots
    if prefills:
        last = [s.row + s.num_tokens - 1 for s in ends]
        rows = np.concatenate([decodes.spans.rows, ints(last)])
        slots += tuple([s.slot for s in ends])
        slot_ids = ints(list(slots))
        event_fields = EventFields.of(sequences)
        firsts = np.array([s.output_index for s in ends], dtype=np.int64)
        output_index = np.concatenate([output_index, firsts])
    num_constrained = decodes.num_constrained + sum(
        [s.sequence.request.grammar is not None for s in ends]
    )
    if not num_constrained:
        return Sampling(sequences, event_fields, slots, slot_ids, output_index, rows)
    order = np.argsort([s.request.grammar is not None for s in sequences], kind="stable")
    in_order = [sequences[place] for place in order]
    return Sampling(
        in_order,
        EventFields.of(in_order),
        tuple([slots[place] for place in order]),
        slot_ids[order],
        output_index[order],
        order.astype(np.int32) if rows is None else rows[order],
        num_constrained,
    )


@dataclass(slots=True)
class Batch:
    """One step. The flat order of its tokens: decodes, short segments, prefill chunks."""

    decodes: DecodeBatch
    short: list[Segment]  # single tokens before others
    long: list[Segment]
    seal: list[Move] = field(default_factory=list)  # tails, before the step
    spill: list[Spill] = field(default_factory=list)
    load: list[Load] = field(default_factory=list)
    restore: list[PartialCopy] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # took their slot for this step
    sampling: Sampling = NOBODY
    num_tokens: int = 0  # rows of the forward pass

    @property
    def prefills(self) -> list[Segment]:
        """What is not decode, in flat order."""
        return self.short + self.long if self.long else self.short

    @property
    def sequences(self) -> list[Sequence]:
        """All, in flat order."""
        return self.decodes.sequences + [segment.sequence for segment in self.prefills]

    @property
    def segments(self) -> list[Segment]:
        """Every sequence of the step spelled out, in flat order; a step's own work does without."""
        return [self._decode(row) for row in range(len(self.decodes))] + self.prefills

    def _decode(self, row: int) -> Segment:
        decodes = self.decodes
        return Segment(
            decodes.sequences[row],
            start=int(decodes.spans.starts[row]),
            num_tokens=1,
            sealed=int(decodes.spans.sealed[row]),
            slot=decodes.slots[row],
            tables=decodes.spans.tables[row],
            samples=True,
            output_index=int(decodes.output_index[row]),
            row=row,
        )

    @property
    def spans(self) -> StepSegments:
        """As the KV cache sees them."""
        single = self.decodes.spans if len(self.decodes) else None
        return StepSegments.of(self.short, self.long, single)

    @property
    def num_slots(self) -> int:
        """Tails that the step needs: also for who is given a page's beginning, and waits yet."""
        slots = [segment.slot for segment in self.prefills]
        slots += [restore.sequence.slot for restore in self.restore]
        return max([self.decodes.num_slots, *[slot + 1 for slot in slots]])

    @property
    def begins_answers(self) -> bool:
        """Whether somebody gets the first token of an answer."""
        return any(s.samples and not s.output_index for s in self.prefills)

    @property
    def looks_for_numbers(self) -> bool:
        """Whether to look if logits are numbers at all: where an answer begins, since damaged
        weights show at once, and as often as tails are sealed, for what goes wrong later.
        """
        return bool(self.seal) or self.begins_answers

    @property
    def writes_pages(self) -> bool:
        """Whether the step writes the pool or reads it out, and so must wait for the one in flight.

        Before the step proper come, in this order: seal, spill, load, restore.
        """
        return bool(self.long or self.seal or self.restore or self.spill or self.load)
