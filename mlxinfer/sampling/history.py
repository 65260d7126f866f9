"""Which tokens came before in each request, and how often: a table on the device. Knows no logits.

The newest token of a request may exist on the device only, where the step in flight samples it. The
table takes it in there, before the next one is chosen, so the host need not know it, ever.
"""

from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .blocks import padded_width

Ints = NDArray[np.int64]
IN_PROMPT = 1 << 30  # added to the count of a token that the prompt has
MIN_ROWS = 8


class TokenHistory:
    """A row (width,) int32 for each slot that is followed: how often the answer has each token.

    Every row has a column to spare, the one after the last token, where anything may be counted.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._width = padded_width(vocab_size)
        self._rows: dict[int, int] = {}  # by slot
        self._table = self._no_rows()
        self._num_counted = np.zeros(0, dtype=np.int64)  # by row: tokens of the answer

    def start(self, slot: int, prompt_ids: Collection[int], output_ids: Sequence[int]) -> None:
        """Follow a slot, which is not followed, whose request has said this so far."""
        row = min(set(range(len(self._rows) + 1)) - set(self._rows.values()))
        self._reserve(row + 1)
        counts = np.zeros(self._width, dtype=np.int32)
        counts[np.asarray(prompt_ids, dtype=np.int64)] = IN_PROMPT
        np.add.at(counts, np.asarray(output_ids, dtype=np.int64), 1)
        self._table[row] = mx.array(counts)
        self._num_counted[row] = len(output_ids)
        self._rows[slot] = row

    def stop(self, slot: int) -> None:
        """Follow a slot no longer, if it was followed."""
        if self._rows.pop(slot, None) is not None and not self._rows:
            self._table, self._num_counted = self._no_rows(), self._num_counted[:0]

    def rows(self, slots: Sequence[int]) -> Ints:
        """(P,) of the table, of slots that are followed."""
        return np.array([self._rows[slot] for slot in slots], dtype=np.int64)

    def came(
        self, rows: Ints, device_rows: mx.array, counts: Ints, newest: mx.array | None
    ) -> mx.array:
        """How often each token came in these rows, with the newest of each.

        Args:
            rows: (P,) all different.
            device_rows: (P,) int32 the same.
            counts: (P,) tokens that their answers have: those counted, and one more at most.
            newest: (P,) int32 the last of them; None: all are counted.

        Returns:
            (P, width) int32, of tokens of the prompt IN_PROMPT more.
        """
        due = counts - self._num_counted[rows]  # (P,) 0 or 1
        num_due = np.count_nonzero(due)
        if num_due:
            assert newest is not None
            assert num_due == due.sum() == due @ due, "a token was passed by"
            if num_due < len(due):
                newest = mx.where(mx.array(due > 0), newest, self._vocab_size)
            self._table = self._table.at[device_rows, newest].add(1)
            self._num_counted[rows] = counts
        return self._table[device_rows]

    def _no_rows(self) -> mx.array:
        return mx.zeros((0, self._width), mx.int32)

    def _reserve(self, num_rows: int) -> None:
        missing = num_rows - len(self._table)
        if missing > 0:
            more = max(missing, len(self._table), MIN_ROWS)
            self._table = mx.concatenate([self._table, mx.zeros((more, self._width), mx.int32)])
            self._num_counted = np.pad(self._num_counted, (0, more))
