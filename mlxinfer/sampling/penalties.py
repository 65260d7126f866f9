"""Penalties on tokens that came before: the history of each request, and its effect on logits.

The newest token of a row may exist on the device only (`pending`): the host then learns of it one
step later through `observe`. Logits come out the same bit for bit, whether it is pending or known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class TokenHistory:
    """Distinct tokens of each slot, and how often each is in its answer.

    A row of `ids` holds `sizes` tokens, then `spare`: the column of a padded row of logits that
    stands for no token. Tokens of a prompt count 0 times.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self._sizes = np.zeros(0, dtype=np.int64)
        self._ids = np.zeros((0, 64), dtype=np.int32)
        self._counts = np.zeros((0, 64), dtype=np.float32)

    def start(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Take up a request, with what it has said so far."""
        output, times = np.unique(np.asarray(output_ids, dtype=np.int32), return_counts=True)
        ids = np.union1d(np.asarray(prompt_ids, dtype=np.int32), output)
        self._reserve(num_slots=slot + 1, num_ids=len(ids) + 1)
        self._ids[slot] = self.spare
        self._counts[slot] = 0
        self._ids[slot, : len(ids)] = ids
        self._counts[slot, np.searchsorted(ids, output)] = times
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


@dataclass(frozen=True, slots=True)
class Penalties:
    """The P rows of a batch that have penalties, and how strong these are; each (P, 1) float32."""

    slots: NDArray[np.int64]  # (P,)
    rows: mx.array  # (P, 1) int32, their places in the batch
    repetition: mx.array
    presence: mx.array
    frequency: mx.array


def penalise(
    logits: mx.array,
    penalties: Penalties,
    history: TokenHistory,
    pending: mx.array | None,
) -> mx.array:
    """Logits after the penalties: repetition, then frequency and presence.

    Repetition (Keskar et al., "CTRL", 2019) divides logits above 0 and multiplies the others, once
    for each distinct token of prompt and answer. Frequency is subtracted once per occurrence in the
    answer, presence once if there is any.

    Args:
        logits: (R, width) float32, padded: column `spare` of the history is -inf.
        penalties: of P of these rows.
        history: what the host knows of their tokens.
        pending: (R,) int32 each row's newest token where the host does not know it, else -1.

    Returns:
        (R, width) float32
    """
    ids, counts = (mx.array(table) for table in history.tables(penalties.slots))  # (P, N)
    if pending is not None:
        newest = pending[penalties.rows]  # (P, 1)
        known = ids == newest
        extra = mx.where(known.any(axis=-1, keepdims=True) | (newest < 0), history.spare, newest)
        ids = mx.concatenate([ids, extra], axis=-1)
        counts = mx.concatenate([counts + known, mx.ones(newest.shape)], axis=-1)
    old = logits[penalties.rows, ids]
    new = mx.where(old > 0, old / penalties.repetition, old * penalties.repetition)
    new = new - penalties.frequency * counts - penalties.presence * (counts > 0)
    logits[penalties.rows, ids] = new  # an id twice in a row is `spare`, and stays -inf
    return logits
