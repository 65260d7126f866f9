"""Where the tokens of a step go in the tails, as arrays that all layers of a group share."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from .inputs import Ints

MIN_PLACES = 8  # MLX passes shorter arrays in another way


@dataclass(frozen=True, slots=True)
class TailPlace:
    """Where N tokens go: each to an offset in the tail of a slot."""

    slots: Ints  # (N,)
    offsets: Ints  # (N,)
    ring: int  # tokens of a tail
    _rows: dict[int, mx.array] = field(default_factory=dict)  # by number of heads
    _marks: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)  # by that of slots

    def rows_of(self, heads: int) -> mx.array:
        """(N * heads, 1): every vector of the tokens among those of all tails of so many heads.

        One index for a vector costs the host a third of what one for each axis costs.
        """
        if heads not in self._rows:
            first = self.slots * np.int32(heads * self.ring) + self.offsets  # (N,) of head 0
            steps = np.arange(0, heads * self.ring, self.ring, dtype=np.int32)
            self._rows[heads] = mx.array((first[:, None] + steps).reshape(-1, 1))
        return self._rows[heads]

    def marks(self, num_slots: int) -> tuple[mx.array, mx.array]:
        """slot * ring + offset of each token, (N,) or 8; and (num_slots, ring) int32, 1 there."""
        if num_slots not in self._marks:
            found = self.slots * np.int32(self.ring) + self.offsets
            places = np.zeros(max(len(found), MIN_PLACES), np.int32)
            places[: len(found)] = found
            taken = np.zeros((num_slots, self.ring), np.int32)
            taken.ravel()[found] = 1
            self._marks[num_slots] = mx.array(places), mx.array(taken)
        return self._marks[num_slots]
