"""Log-probabilities of the model's own distribution, for the rows that ask for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..core import TokenLogprobs
from .draw import largest_entries, pad_rows


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The A rows of a batch that ask for log-probabilities, and of how many top tokens."""

    rows: tuple[int, ...]  # places in the batch
    nums: tuple[int, ...]
    device_rows: mx.array  # (A,) int32


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Log-probabilities of one step for A rows; n is the most top tokens that one row asks for.

    Lazy until evaluated; read_logprobs turns it into plain Python.
    """

    asked: LogprobRows
    chosen: mx.array  # (A,) float32
    top_ids: mx.array | None  # (A, n) int32, most probable first
    top: mx.array | None  # (A, n) float32

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [array for array in (self.chosen, self.top_ids, self.top) if array is not None]


def logprob_rows(rows: Sequence[int], nums: Sequence[int]) -> LogprobRows:
    """The rows that ask, with the number of top tokens of each."""
    return LogprobRows(tuple(rows), tuple(nums), mx.array(list(rows), mx.int32))


def compute_logprobs(logits: mx.array, tokens: mx.array, asked: LogprobRows) -> LogprobArrays:
    """Log-probabilities at temperature 1 of the chosen and of the most probable tokens.

    Args:
        logits: (R, V) as the model gave them.
        tokens: (R,) int32 the chosen ones.
        asked: the rows to work out.
    """
    rows = pad_rows(logits[asked.device_rows])  # (A, width)
    total = mx.logsumexp(rows, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(rows, tokens[asked.device_rows][:, None], axis=-1) - total
    n = min(max(asked.nums), logits.shape[-1])
    if n == 0:
        return LogprobArrays(asked, chosen[:, 0], None, None)
    values, ids = largest_entries(rows, n)
    return LogprobArrays(asked, chosen[:, 0], ids, values - total)


def read_logprobs(arrays: LogprobArrays) -> dict[int, TokenLogprobs]:
    """Row of the batch -> its log-probabilities; waits for the arrays if they are not there yet.

    A row gets the number that it asks for, or the whole vocabulary where that is smaller.
    """
    chosen, ids, top = (
        [] if array is None else np.array(array).tolist()
        for array in (arrays.chosen, arrays.top_ids, arrays.top)
    )
    found = {}
    for place, (row, num) in enumerate(zip(arrays.asked.rows, arrays.asked.nums, strict=True)):
        pairs = zip(ids[place][:num], top[place][:num], strict=True) if num else ()
        found[row] = TokenLogprobs(logprob=chosen[place], top=tuple(pairs))
    return found
