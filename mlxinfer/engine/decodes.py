"""The sequences that decode, as rows of arrays, one token each. Knows no pages and no queue.

From one step to the next each position is one further and all else is as it was: then the rows
move on, whoever they are. They are read anew when somebody joins or leaves, or a tail was sealed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..cache.spans import Ints, ShortSpans, ints
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Decodes:
    """B sequences in one step. Nothing in it is ever changed: a step in flight has its own."""

    sequences: list[Sequence]  # (B,) in order of admission
    slots: tuple[int, ...]  # (B,) of their tails and in the sampler
    spans: ShortSpans  # the same order; flat rows 0 to B - 1
    output_index: NDArray[np.int64]  # (B,) which token of each answer is sampled, from 0
    room: Ints  # (B,) positions that their tables have room for
    num_guided: int  # under a grammar
    num_steps: int  # in how many, with this one, nobody has the last token there is room for

    @staticmethod
    def of(running: Iterable[Sequence]) -> "Decodes":
        """Those of which the newest token of the answer is all that is left to compute."""
        found = [s for s in running if s.decodes]
        slots = [s.slot for s in found]
        spans = ShortSpans(
            [s.tables for s in found],
            np.arange(len(found), dtype=np.int32),
            ints([s.num_computed for s in found]),
            np.ones(len(found), dtype=np.int32),
            ints([s.num_sealed for s in found]),
            ints(slots),
        )
        return Decodes(
            found,
            tuple(slots),
            spans,
            np.array([s.num_output for s in found], dtype=np.int64),
            ints([s.num_slots for s in found]),
            sum([s.request.grammar is not None for s in found]),
            min([s.max_known - s.num_known - s.num_pending for s in found], default=0),
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def moved_on(self) -> "Decodes":
        """The next token of each."""
        assert self.num_steps > 1
        return replace(
            self,
            spans=self.spans.moved_on(),
            output_index=self.output_index + 1,
            num_steps=self.num_steps - 1,
        )

    def still_running(self) -> "Decodes":
        """Without those that lost their slot."""
        return Decodes.of([s for s in self.sequences if s.slot >= 0])

    def without_room(self) -> list[Sequence]:
        """Those whose tables have no slot for the token."""
        return [self.sequences[row] for row in np.flatnonzero(self.spans.starts >= self.room)]

    def with_room(self) -> "Decodes":
        """After tables have grown."""
        return replace(self, room=ints([s.num_slots for s in self.sequences]))

    def sealed_to(self, stops: Ints) -> "Decodes":
        """After tails were sealed up to (B,) these positions."""
        spans = self.spans
        sealed = ShortSpans(
            spans.tables, spans.rows, spans.starts, spans.counts, stops, spans.slots
        )
        return replace(self, spans=sealed)
