"""Penalties on tokens that came before. Knows the tokens of a batch, not its requests.

The newest token of a row may exist on the device only (`pending`): the host then learns of it one
step later. Logits come out the same bit for bit, whether it is pending or known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .blocks import padded_width
from .history import TokenHistory


@dataclass(frozen=True, slots=True)
class Penalties:
    """The P rows of a batch that have penalties, and how strong these are."""

    slots: NDArray[np.int64]  # (P,)
    places: mx.array | None  # (P,) int32 in the batch; None: all of it, in order
    repetition: mx.array  # (P, 1) float32
    presence: mx.array  # (P, 1) float32
    frequency: mx.array  # (P, 1) float32
    prompts: mx.array | None  # (P, width) bool, see prompt_mask; None: no prompt counts


def prompt_mask(prompt_ids: Sequence[int], vocab_size: int) -> mx.array:
    """(width,) bool the tokens of a prompt.

    A prompt may hold most of the vocabulary and never changes: it is sent to the device once.
    """
    mask = np.zeros(padded_width(vocab_size), dtype=np.bool_)
    mask[np.asarray(prompt_ids, dtype=np.int64)] = True
    return mx.array(mask)


def penalise(
    logits: mx.array, penalties: Penalties, history: TokenHistory, pending: mx.array | None
) -> mx.array:
    """Logits after the penalties: repetition, then frequency and presence.

    Repetition (Keskar et al., "CTRL", 2019) divides logits above 0 and multiplies the others, once
    for each distinct token of prompt and answer. Frequency is subtracted once per occurrence in the
    answer, presence once if there is any.

    Args:
        logits: (R, width) float32, padded: column `spare` of the history is -inf.
        penalties: of P of these rows.
        history: what the host knows of their answers.
        pending: (R,) int32 each row's newest token where the host does not know it, else -1.

    Returns:
        (R, width) float32
    """
    places = penalties.places
    rows = logits if places is None else logits[places]  # (P, width)
    if penalties.prompts is not None:
        rows = mx.where(penalties.prompts, _repeated(rows, penalties.repetition), rows)
    ids, counts = (mx.array(table) for table in history.tables(penalties.slots))  # (P, N)
    if pending is not None:
        newest = (pending if places is None else pending[places])[:, None]
        ids, counts = _with_newest(ids, counts, newest, history.spare)
    old = mx.take_along_axis(rows, ids, axis=-1)
    new = _repeated(old, penalties.repetition)
    if penalties.prompts is not None:
        new = mx.where(mx.take_along_axis(penalties.prompts, ids, axis=-1), old, new)
    new = new - penalties.frequency * counts - penalties.presence * (counts > 0)
    rows = mx.put_along_axis(rows, ids, new, axis=-1)  # what comes twice is `spare`, still -inf
    if places is None:
        return rows
    logits[places] = rows
    return logits


def _repeated(logits: mx.array, penalty: mx.array) -> mx.array:
    return mx.where(logits > 0, logits / penalty, logits * penalty)


def _with_newest(
    ids: mx.array, counts: mx.array, newest: mx.array, spare: int
) -> tuple[mx.array, mx.array]:
    """Tables (P, N + 1) with one more token a row, (P, 1): counted where it is, or in a new column.

    Where no new column is needed it stands for no token.
    """
    known = ids == newest
    place = mx.where(known.any(axis=-1, keepdims=True) | (newest < 0), spare, newest)
    counts = mx.concatenate([counts + known, mx.ones(newest.shape)], axis=-1)
    return mx.concatenate([ids, place], axis=-1), counts
