"""What is done to the cache's arrays between two steps. Plain values; knows no arrays of MLX."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .page_table import PageTable
from .segments import Ints, ints


class Move(NamedTuple):
    """Tail tokens of one sequence to be written to pages: positions [start, stop)."""

    tables: list[PageTable]  # where to, one per layer group
    slot: int  # of the tail
    start: int
    stop: int


class PartialCopy(NamedTuple):
    """The first tokens of a shared page, to be copied into a sequence's own page and tail."""

    tables: list[PageTable]  # of the sequence, one per layer group
    slot: int  # of its tail
    start: int  # position of the page's first token
    stop: int  # one past the last position that is copied
    pages: list[int | None]  # by group: the shared page; None: no later token sees any of it


class Spill(NamedTuple):
    """An evicted page, to be read out before the step writes over it."""

    group: int
    page: int
    key: bytes  # what it is stored under
    parent: bytes
    token_ids: tuple[int, ...]  # of this page alone


class Load(NamedTuple):
    """Stored bytes to be written to a page."""

    group: int
    page: int
    payload: memoryview


@dataclass(slots=True)
class CacheWork:
    """What is done before a step.

    In this order: `seal` and `save`, since what is evicted may hold what is written only now;
    `spill`; `load`; `copies` and `resume`, which may read what is loaded; `drop`.
    """

    seal: list[Move] = field(default_factory=list)
    spill: list[Spill] = field(default_factory=list)
    load: list[Load] = field(default_factory=list)
    copies: list[PartialCopy] = field(default_factory=list)
    save: list[tuple[int, int]] = field(default_factory=list)  # slot, snapshot of its state
    leave: list[int] = field(default_factory=list)  # slots that were given up
    resume: list[tuple[int, int]] = field(default_factory=list)  # snapshot, slot to go on from it
    drop: list[int] = field(default_factory=list)  # snapshots that were given up

    @property
    def is_empty(self) -> bool:
        """Nothing is to be done."""
        states = self.save or self.leave or self.resume or self.drop
        return not (self.seal or self.spill or self.load or self.copies or states)

    @property
    def writes_pages(self) -> bool:
        """Whether pages are written or read out, which must wait for the step in flight."""
        return bool(self.seal or self.spill or self.load or self.copies)

    @property
    def num_slots(self) -> int:
        """Tails that must be there."""
        return 1 + max([copy.slot for copy in self.copies]) if self.copies else 0


def seal_index(moves: Sequence[Move], group: int, page_size: int) -> tuple[Ints, Ints, Ints] | None:
    """Tail slots, offsets in the tails and pool slots (N,) of the tokens that move.

    Args:
        moves: what lies in pages that a window recycled already is left out.
        group: the layer group, by number.

    Returns:
        None: nothing moves.
    """
    found: list[int] = []  # page, its first position, slot, from, to; for each page in turn
    for tables, slot, start, stop in moves:
        table = tables[group]
        for number in range(start // page_size, -(-stop // page_size)):
            page = table.page_at(number)
            if page is not None:
                found += page, number * page_size, slot, start, stop
    if not found:
        return None
    pages, firsts, slots, starts, stops = ints(found).reshape(-1, 5).T[:, :, None]  # (n, 1)
    step = np.arange(page_size, dtype=np.int32)
    positions = firsts + step  # (n, page_size)
    moving = (positions >= starts) & (positions < stops)
    targets = pages * page_size + step
    offsets = positions % (2 * page_size)
    return np.broadcast_to(slots, moving.shape)[moving], offsets[moving], targets[moving]
