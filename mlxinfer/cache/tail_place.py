"""Where the tokens of a step go in tails. Knows slots and offsets; no arrays of a pool."""

import mlx.core as mx
import numpy as np

from .segments import Ints


class TailPlace:
    """Where N tokens go: each to an offset in the tail of a slot.

    Tails are written as rows of one vector, (slots * heads * ring, W): one index array for a row
    costs the host a third of what one for each axis costs.

    Args:
        slots, offsets: (N,).
        ring: tokens of a tail.
    """

    __slots__ = ("_offsets", "_ring", "_rows", "_slots")

    def __init__(self, slots: Ints, offsets: Ints, ring: int) -> None:
        self._slots, self._offsets, self._ring = slots, offsets, ring
        self._rows: dict[int, mx.array] = {}

    def rows(self, heads: int) -> mx.array:
        """(N * heads, 1): of every vector of the tokens, in tails of so many heads."""
        found = self._rows.get(heads)
        if found is None:
            found = self._rows[heads] = mx.array(self._rows_of(heads))
        return found

    def _rows_of(self, heads: int) -> Ints:
        first = self._slots * np.int32(heads * self._ring) + self._offsets  # (N,) of head 0
        steps = np.arange(0, heads * self._ring, self._ring, dtype=np.int32)
        return (first[:, None] + steps).reshape(-1, 1)
