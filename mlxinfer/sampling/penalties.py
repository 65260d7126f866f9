"""Penalties on tokens that came before. Knows which came (`history.py`), not whose they are."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .history import IN_PROMPT, TokenHistory


@dataclass(frozen=True, slots=True)
class Penalties:
    """The P rows of a batch that have penalties, and how strong these are."""

    index: NDArray[np.int64]  # (P,) in the batch
    places: mx.array | None  # (P,) int32 the same; None: all of it, in order
    rows: NDArray[np.int64]  # (P,) in the history
    device_rows: mx.array  # (P,) int32 the same
    repetition: mx.array | None  # (P, width) float32; None: no row has it, and so with the others
    presence: mx.array | None  # (P, 1) float32
    frequency: mx.array | None  # (P, 1) float32


def penalise(
    logits: mx.array,
    penalties: Penalties,
    history: TokenHistory,
    counts: NDArray[np.int64],
    newest: mx.array | None,
) -> mx.array:
    """Logits after the penalties: repetition, then frequency and presence.

    Repetition (Keskar et al., "CTRL", 2019) divides logits above 0 and multiplies the others, once
    for each distinct token of prompt and answer. Frequency is subtracted once per occurrence in the
    answer, presence once if there is any.

    Args:
        logits: (R, width) float32, padded: the spare column of the history is -inf.
        penalties: of P of these rows.
        history: of their requests; it takes in the newest tokens.
        counts: (R,) tokens that each answer has.
        newest: (R,) int32 the last of them; None: the history has them all.

    Returns:
        (R, width) float32
    """
    places = penalties.places
    if newest is not None and places is not None:
        newest = mx.take_along_axis(newest, places, axis=0)
    counted = counts[penalties.index]
    came = history.came(penalties.rows, penalties.device_rows, counted, newest)  # (P, width)
    rows = logits if places is None else logits[places]  # (P, width)
    rows = _penalised(rows, penalties, came)
    if places is None:
        return rows
    logits[places] = rows
    return logits


def _penalised(rows: mx.array, penalties: Penalties, came: mx.array) -> mx.array:
    """(P, width) rows, as they are where no token came."""
    if penalties.repetition is not None:
        rows = mx.where(came > 0, _repeated(rows, penalties.repetition), rows)
    if penalties.frequency is None and penalties.presence is None:
        return rows
    times = came & (IN_PROMPT - 1)  # in the answer
    if penalties.frequency is not None:
        rows = rows - penalties.frequency * times
    if penalties.presence is not None:
        rows = mx.where(times > 0, rows - penalties.presence, rows)
    return rows


def _repeated(logits: mx.array, strength: mx.array) -> mx.array:
    return mx.where(logits > 0, logits / strength, logits * strength)
