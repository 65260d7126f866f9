"""Which tail tokens go to which places of a pool when tails are sealed. Knows no arrays of MLX."""

from collections.abc import Sequence
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


def seal_index(moves: Sequence[Move], group: int, page_size: int) -> tuple[Ints, Ints, Ints] | None:
    """Tail slots, offsets in the tails and pool slots (N,) of the tokens that move.

    Args:
        moves: what lies in pages that a window let go of already is left out.
        group: whose tables count.

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
