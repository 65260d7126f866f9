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
class Repetition:
    """The repetition penalties of P rows, some of which may be 1."""

    strength: mx.array  # (P, width) float32
    prompts: mx.array  # (P, width) bool, see prompt_mask


@dataclass(frozen=True, slots=True)
class Penalties:
    """The P rows of a batch that have penalties, and how strong these are."""

    slots: NDArray[np.int64]  # (P,)
    places: mx.array | None  # (P,) int32 in the batch; None: all of it, in order
    repetition: Repetition | None  # None: no row has it, and so with the others
    presence: mx.array | None  # (P, 1) float32
    frequency: mx.array | None  # (P, 1) float32


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
    if pending is not None and places is not None:
        pending = mx.take_along_axis(pending, places, axis=0)
    ids, subtracted = _answers(penalties, history, pending)
    rows = logits if places is None else logits[places]  # (P, width)
    repeated = rows  # as if every token came before
    if penalties.repetition is not None:
        repeated = _repeated(rows, penalties.repetition.strength)
        rows = mx.where(penalties.repetition.prompts, repeated, rows)
    new = mx.take_along_axis(repeated, ids, axis=-1)
    for amount in subtracted:
        new = new - amount
    rows = mx.put_along_axis(rows, ids, new, axis=-1)
    if places is None:
        return rows
    logits[places] = rows
    return logits


def _repeated(logits: mx.array, strength: mx.array) -> mx.array:
    return mx.where(logits > 0, logits / strength, logits * strength)


def _answers(
    penalties: Penalties, history: TokenHistory, pending: mx.array | None
) -> tuple[mx.array, list[mx.array]]:
    """The tokens (P, N) of the answers and what is subtracted from their logits.

    A token may come twice, and then the same is subtracted both times. What stands for no token is
    a column that is -inf, whatever is subtracted: `spare`, or -1, the last one.
    """
    ids = mx.array(history.ids(penalties.slots))
    newest = None if pending is None else pending[:, None]  # (P, 1)
    subtracted = []
    if penalties.frequency is not None:
        counts = mx.array(history.counts(penalties.slots))
        if newest is not None:
            counts, newest = _counted(ids, counts, newest, history.spare)
        subtracted.append(penalties.frequency * counts)
    if penalties.presence is not None:
        subtracted.append(penalties.presence)
    return ids if newest is None else mx.concatenate([ids, newest], axis=-1), subtracted


def _counted(
    ids: mx.array, counts: mx.array, newest: mx.array, spare: int
) -> tuple[mx.array, mx.array]:
    """Counts (P, N + 1) with one more token a row, and this (P, 1), or `spare` where it is known.

    A token that is known is counted in its own column.
    """
    known = ids == newest
    counts = mx.concatenate([counts + known, mx.ones(newest.shape)], axis=-1)
    return counts, mx.where(known.any(axis=-1, keepdims=True), spare, newest)
