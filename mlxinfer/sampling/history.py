"""Which tokens each answer holds so far, and how often: tables for a whole batch. Knows no mlx."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class TokenHistory:
    """Distinct tokens of the answer of each slot it follows, and how often each of them is there.

    A row of `ids` holds `sizes` tokens, then `spare`: the column of a padded row of logits that
    stands for no token. `columns` finds a token in it, at a cost that does not grow with answers.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self._columns: dict[int, dict[int, int]] = {}  # slot -> token -> column
        self._sizes: dict[int, int] = {}  # of the same slots
        self._ids = np.zeros((0, 64), dtype=np.int32)
        self._counts = np.zeros((0, 64), dtype=np.float32)

    def start(self, slot: int, output_ids: Sequence[int]) -> None:
        """Follow a slot, whose request has said this so far."""
        ids, times = np.unique(np.asarray(output_ids, dtype=np.int32), return_counts=True)
        num_ids = len(ids)
        self._reserve(num_slots=slot + 1, num_ids=num_ids)
        self._ids[slot] = self.spare
        self._counts[slot] = 0
        self._ids[slot, :num_ids] = ids
        self._counts[slot, :num_ids] = times
        self._columns[slot] = dict(zip(ids.tolist(), range(num_ids), strict=True))
        self._sizes[slot] = num_ids

    def stop(self, slot: int) -> None:
        """Follow a slot no longer, if it was followed."""
        self._columns.pop(slot, None)
        self._sizes.pop(slot, None)

    def observe(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Add one token to each of these slots, all different, that is followed."""
        if not self._columns:
            return
        new = dict(zip(slots, token_ids, strict=True))
        rows, tokens, columns = [], [], []
        for slot, known in self._columns.items():
            if slot in new:
                token = new[slot]
                if token not in known:
                    known[token] = self._sizes[slot]
                    self._sizes[slot] += 1
                rows += [slot]
                tokens += [token]
                columns += [known[token]]
        if rows:
            self._reserve(num_slots=0, num_ids=max(columns) + 1)
            place = np.array(rows), np.array(columns)
            self._ids[place] = tokens
            self._counts[place] += 1

    def ids(self, slots: NDArray[np.int64]) -> Ints:
        """(P, N) distinct ids, as wide as the longest of these histories."""
        return self._ids[slots, : self._width(slots)]

    def counts(self, slots: NDArray[np.int64]) -> Floats:
        """(P, N) how often each of the `ids` is there."""
        return self._counts[slots, : self._width(slots)]

    def _width(self, slots: NDArray[np.int64]) -> int:
        return max(1, max([self._sizes[slot] for slot in slots.tolist()]))

    def _reserve(self, *, num_slots: int, num_ids: int) -> None:
        rows, columns = self._ids.shape
        if num_slots <= rows and num_ids <= columns:
            return
        more_rows = max(num_slots, 2 * rows) - rows if num_slots > rows else 0
        more_columns = max(num_ids, 2 * columns) - columns if num_ids > columns else 0
        more = ((0, more_rows), (0, more_columns))
        self._ids = np.pad(self._ids, more, constant_values=self.spare)
        self._counts = np.pad(self._counts, more)
