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
        self._sizes = np.full(1, -1)  # by slot, -1: not followed; the last: all that lie beyond
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
        self._sizes[slot] = num_ids
        self._columns[slot] = dict(zip(ids.tolist(), range(num_ids), strict=True))

    def stop(self, slot: int) -> None:
        """Follow a slot no longer, if it was followed."""
        if self._columns.pop(slot, None) is not None:
            self._sizes[slot] = -1

    def observe(self, slots: Ints, token_ids: Ints) -> None:
        """Add one token to each of these slots (N,), all different, that is followed; -1: none."""
        beyond = len(self._sizes) - 1
        places = np.flatnonzero(self._sizes[np.minimum(slots, beyond)] >= 0)
        if not len(places):
            return
        rows, tokens = slots[places], token_ids[places]
        columns = self._columns_of(rows, tokens)
        self._reserve(num_slots=0, num_ids=int(columns.max()) + 1)
        self._ids[rows, columns] = tokens
        self._counts[rows, columns] += 1

    def ids(self, slots: NDArray[np.int64]) -> Ints:
        """(P, N) distinct ids, as wide as the longest of these histories."""
        return self._ids[slots, : self._width(slots)]

    def counts(self, slots: NDArray[np.int64]) -> Floats:
        """(P, N) how often each of the `ids` is there."""
        return self._counts[slots, : self._width(slots)]

    def _columns_of(self, slots: Ints, token_ids: Ints) -> NDArray[np.int64]:
        """(P,) where each token is in the row of its slot, or is to be from now on."""
        sizes = self._sizes[slots]
        tables = [self._columns[slot] for slot in slots.tolist()]
        tokens = token_ids.tolist()
        for known, token, size in zip(tables, tokens, sizes.tolist(), strict=True):
            if token not in known:
                known[token] = size
        columns = np.array([known[token] for known, token in zip(tables, tokens, strict=True)])
        self._sizes[slots] = np.maximum(sizes, columns + 1)
        return columns

    def _width(self, slots: NDArray[np.int64]) -> int:
        return int(self._sizes[slots].max(initial=1))

    def _reserve(self, *, num_slots: int, num_ids: int) -> None:
        rows, columns = self._ids.shape
        if num_slots <= rows and num_ids <= columns:
            return
        more_rows = max(num_slots, 2 * rows) - rows if num_slots > rows else 0
        more_columns = max(num_ids, 2 * columns) - columns if num_ids > columns else 0
        more = ((0, more_rows), (0, more_columns))
        self._ids = np.pad(self._ids, more, constant_values=self.spare)
        self._counts = np.pad(self._counts, more)
        self._sizes = np.pad(self._sizes, more[0], constant_values=-1)
