"""Which tokens each answer holds so far, and how often: tables for a whole batch. Knows no mlx."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class TokenHistory:
    """Distinct tokens of the answer of each slot, and how often each of them is there.

    A row of `ids` holds `sizes` tokens, then `spare`: the column of a padded row of logits that
    stands for no token.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self._sizes = np.zeros(0, dtype=np.int64)
        self._ids = np.zeros((0, 64), dtype=np.int32)
        self._counts = np.zeros((0, 64), dtype=np.float32)

    def start(self, slot: int, output_ids: Sequence[int]) -> None:
        """Take up a request, with what it has said so far."""
        ids, times = np.unique(np.asarray(output_ids, dtype=np.int32), return_counts=True)
        self._reserve(num_slots=slot + 1, num_ids=len(ids))
        self._ids[slot] = self.spare
        self._counts[slot] = 0
        self._ids[slot, : len(ids)] = ids
        self._counts[slot, : len(ids)] = times
        self._sizes[slot] = len(ids)

    def observe(self, slots: NDArray[np.int64], token_ids: Ints) -> None:
        """Add one token to each of these slots, which are distinct."""
        num_ids = int(self._sizes[slots].max()) + 1
        self._reserve(num_slots=0, num_ids=num_ids)
        found = self._ids[slots, :num_ids] == token_ids[:, None]
        is_new = ~found.any(axis=1)
        columns = np.where(is_new, self._sizes[slots], found.argmax(axis=1))
        self._ids[slots, columns] = token_ids
        self._counts[slots, columns] += 1
        self._sizes[slots] += is_new

    def tables(self, slots: NDArray[np.int64]) -> tuple[Ints, Floats]:
        """(P, N) distinct ids and their counts, as wide as the longest of these histories."""
        num_ids = max(1, int(self._sizes[slots].max()))
        return self._ids[slots, :num_ids], self._counts[slots, :num_ids]

    def _reserve(self, *, num_slots: int, num_ids: int) -> None:
        rows, columns = self._ids.shape
        if num_slots <= rows and num_ids <= columns:
            return
        more_rows = max(num_slots, 2 * rows) - rows if num_slots > rows else 0
        more_columns = max(num_ids, 2 * columns) - columns if num_ids > columns else 0
        more = ((0, more_rows), (0, more_columns))
        self._sizes = np.pad(self._sizes, more[0])
        self._ids = np.pad(self._ids, more, constant_values=self.spare)
        self._counts = np.pad(self._counts, more)
