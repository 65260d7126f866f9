"""The repetition penalty over the last tokens of prompt and answer alone.

llama.cpp's `repeat_last_n` and mlx-lm's `repetition_context_size`. The penalty itself is that of
`adjustments`, which has the form over all tokens. P = rows with a window, W = the widest of them.

The newest tokens of a row may be known to the device alone (`recent`), as in `adjustments`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams
from .adjustments import repeated, strength_of

MIN_ROOM = 64  # tokens that are added before any is moved


class WindowHistory:
    """The last tokens of one request.

    Args:
        params: with a window.
        ids: its prompt, and its answer so far.
    """

    def __init__(self, params: SamplingParams, ids: Sequence[int]) -> None:
        self.strength, self.size = strength_of(params), params.repetition_window
        self._ids = np.array(ids[-self.size :], dtype=np.int32)
        self._end = len(self._ids)

    @property
    def ids(self) -> NDArray[np.int32]:
        """(N,) the tokens of the window, in order."""
        return self._ids[max(self._end - self.size, 0) : self._end]

    def append(self, token_id: int) -> None:
        """Add one token. Those of the window move once in as many calls as it has tokens."""
        if self._end == len(self._ids):
            kept = self.ids
            room = np.empty(max(len(kept), MIN_ROOM), dtype=np.int32)
            self._ids, self._end = np.concatenate([kept, room]), len(kept)
        self._ids[self._end] = token_id
        self._end += 1


@dataclass(frozen=True, slots=True)
class Windows:
    """The P rows of a batch with a window."""

    slots: tuple[int, ...]
    places: mx.array  # (P,) int32 in the batch
    sizes: mx.array  # (P, 1) int32
    strengths: mx.array  # (P, 1) float32


def window_rows(slots: Sequence[int], histories: Mapping[int, WindowHistory]) -> Windows | None:
    """The rows of a batch with a window; None: there are none."""
    places = [place for place, slot in enumerate(slots) if slot in histories]
    if not places:
        return None
    found = [histories[slots[place]] for place in places]
    return Windows(
        slots=tuple(slots[place] for place in places),
        places=mx.array(places, mx.int32),
        sizes=mx.array([[each.size] for each in found], mx.int32),
        strengths=mx.array([[each.strength] for each in found], mx.float32),
    )


def penalise_window(
    logits: mx.array,
    windows: Windows,
    histories: Mapping[int, WindowHistory],
    recent: mx.array | None,
    spare: int,
) -> mx.array:
    """Logits with the penalty of what stands in each row's window.

    Args:
        logits: (R, width) float32, padded.
        windows: of P of these rows.
        histories: by slot.
        recent: (R, n) int32 the newest tokens of each row that are not in its history, then -1.
        spare: a column that stands for no token; it is -inf.

    Returns:
        (R, width) float32
    """
    found = [histories[slot].ids for slot in windows.slots]
    known = np.full((len(found), max(1, *map(len, found))), -1, dtype=np.int32)
    for row, last in zip(known, found, strict=True):
        row[: len(last)] = last
    tokens = mx.array(known)
    if recent is not None:
        tokens = mx.concatenate([tokens, recent[windows.places]], axis=-1)
    there = tokens >= 0
    from_end = mx.cumsum(there.astype(mx.int32), axis=-1, reverse=True)  # the last token: 1
    ids = mx.where(there & (from_end <= windows.sizes), tokens, spare)  # (P, W + n)
    rows = logits[windows.places]
    new = repeated(mx.take_along_axis(rows, ids, axis=-1), windows.strengths)
    logits[windows.places] = mx.put_along_axis(rows, ids, new, axis=-1)
    return logits
