"""The sequences that decode, as rows of arrays, one token each. Knows no pages and no queue.

From one step to the next each position is one further and all else is as it was: then the rows
move on, however many they are. They are read anew when somebody joins, leaves or has its last
token in flight, or when a page was replaced by an equal one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..cache.segments import Ints, Segments, ints
from .sequence import EventFields, Sequence


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """B sequences in one step. Nothing in it is ever changed: a step in flight has its own."""

    sequences: list[Sequence]  # (B,) in order of admission
    slots: tuple[int, ...]  # (B,) of their tails and in the sampler
    event_fields: EventFields
    spans: Segments  # the same order; flat rows 0 to B - 1
    output_index: NDArray[np.int64]  # (B,) which token of each answer is sampled, from 0
    num_constrained: int  # under a grammar
    num_slots: int  # tails up to the last of theirs
    fullest: int  # tokens in the fullest tail, with the new one
    steps_left: int  # with this one, before the first of them has its last token in flight
    age: int = 0  # steps since they were read
    _at_page_start: dict[int, list[int]] = field(default_factory=dict, repr=False)  # by age

    @staticmethod
    def of(running: Iterable[Sequence]) -> "DecodeBatch":
        """Those of which the newest token of the answer is all that is left to compute."""
        found = [s for s in running if s.decodes]
        slots = [s.slot for s in found]
        spans = Segments(
            [s.tables for s in found],
            np.arange(len(found), dtype=np.int32),
            ints([s.num_computed for s in found]),
            np.ones(len(found), dtype=np.int32),
            ints([s.num_sealed for s in found]),
            ints(slots),
        )
        return DecodeBatch(
            found,
            tuple(slots),
            EventFields.of(found),
            spans,
            np.array([s.num_output for s in found], dtype=np.int64),
            sum([s.request.grammar is not None for s in found]),
            max(slots, default=-1) + 1,
            max([s.num_computed + 1 - s.num_sealed for s in found], default=0),
            min([s.max_known - s.num_known - s.num_pending for s in found], default=0),
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def advance(self) -> "DecodeBatch":
        """The next token of each."""
        assert self.steps_left > 1
        return DecodeBatch(
            self.sequences,
            self.slots,
            self.event_fields,
            self.spans.advance(),
            self.output_index + 1,
            self.num_constrained,
            self.num_slots,
            self.fullest + 1,
            self.steps_left - 1,
            self.age + 1,
            self._at_page_start,
        )

    def without_preempted(self) -> "DecodeBatch":
        """Without those that lost their slot."""
        return DecodeBatch.of([s for s in self.sequences if s.slot >= 0])

    def at_page_start(self, page_size: int) -> list[int]:
        """Rows whose token is the first of a page; worked out once for each age modulo a page."""
        phase = self.age % page_size
        rows = self._at_page_start.get(phase)
        if rows is None:
            rows = np.flatnonzero(self.spans.starts % page_size == 0).tolist()
            self._at_page_start[phase] = rows
        return rows

    def sealed_to(self, stops: Ints) -> "DecodeBatch":
        """After tails were sealed up to (B,) these positions."""
        fullest = int((self.spans.starts - stops).max(initial=-1)) + 1
        return replace(self, spans=self.spans.sealed_to(stops), fullest=fullest)
