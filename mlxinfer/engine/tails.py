"""Which tail pages move into the pool before a step. Knows counts and positions, no arrays.

A barrier costs the same for one as for all: where any tail is full, every full page of a tail goes.
"""

import numpy as np

from ..cache.sealing import Move
from .batch import Batch
from .counters import Counters
from .kv_manager import KVManager
from .sequence import Sequence


class Tails:
    """The tails of those that run, each a ring of two pages.

    Args:
        kv_manager: is told of pages that are written.
        counters: of pages sealed.
        page_size: tokens a page.
    """

    def __init__(self, kv_manager: KVManager, counters: Counters, page_size: int) -> None:
        self._kv = kv_manager
        self._counters = counters
        self._page_size = page_size

    def seal(self, batch: Batch) -> None:
        """Add to a step what is to be moved before it.

        A step that writes pages anyhow has its barrier, so it seals too.
        """
        fullest = max([s.stop - s.sealed for s in batch.short], default=0)
        fullest = max(fullest, batch.decodes.fullest)
        if fullest > 2 * self._page_size or batch.writes_pages:
            self._seal_decodes(batch)
            self._seal_prefills(batch)

    def _seal_decodes(self, batch: Batch) -> None:
        spans, sequences = batch.decodes.spans, batch.decodes.sequences
        stops = np.maximum(spans.starts - spans.starts % self._page_size, spans.sealed)
        stops_of = stops.tolist()
        for row in np.flatnonzero(stops > spans.sealed).tolist():
            batch.seal.append(self._move(sequences[row], stops_of[row]))
        batch.decodes = batch.decodes.sealed_to(stops)

    def _seal_prefills(self, batch: Batch) -> None:
        for segment in batch.prefills:
            stop = segment.start - segment.start % self._page_size
            if stop > segment.sealed:
                batch.seal.append(self._move(segment.sequence, stop))
                segment.sealed = stop

    def _move(self, sequence: Sequence, stop: int) -> Move:
        start = sequence.num_sealed
        sequence.num_sealed = stop
        self._counters.pages_sealed += (stop - start) // self._page_size
        if start < sequence.num_prompt:
            self._kv.wrote(sequence)
        else:
            self._kv.wrote_answer(sequence)
        return Move(sequence.tables, sequence.slot, start, stop)
