"""What is added to logits: logit_bias, end tokens forbidden before min_tokens, grammar masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..core import SamplingParams

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class SparseBias:
    """What one request adds to its logits."""

    ids: tuple[int, ...]
    values: tuple[float, ...]  # -inf: only until min_tokens are there
    min_tokens: int


def sparse_bias(params: SamplingParams, stop_ids: frozenset[int]) -> SparseBias | None:
    """The additions that a request asks for; None: none."""
    banned = sorted(stop_ids) if params.min_tokens > 0 else []
    if not banned and not params.logit_bias:
        return None
    return SparseBias(
        ids=(*params.logit_bias, *banned),
        values=(*params.logit_bias.values(), *[-np.inf] * len(banned)),
        min_tokens=params.min_tokens,
    )


class Biases:
    """The additions of those rows of a batch that have any, as padded tables."""

    def __init__(self, rows: Sequence[int], biases: Sequence[SparseBias], spare: int) -> None:
        """Put the additions of B rows together; `spare` is a column that stands for no token."""
        shape = (len(rows), max(len(bias.ids) for bias in biases))
        ids = np.full(shape, spare, dtype=np.int32)
        values = np.zeros(shape, dtype=np.float32)
        for row, bias in enumerate(biases):
            ids[row, : len(bias.ids)] = bias.ids
            values[row, : len(bias.values)] = bias.values
        self._rows = np.array(rows)  # (B,)
        self._min_tokens = np.array([bias.min_tokens for bias in biases])[:, None]
        self._values = values  # (B, n)
        self._lasting = np.where(np.isinf(values), np.float32(0), values)
        self._has_lasting = bool(self._lasting.any())
        self._device_rows = mx.array(self._rows[:, None], mx.int32)
        self._device_ids = mx.array(ids)
        self._device_lasting = mx.array(self._lasting)

    def apply(self, logits: mx.array, counts: NDArray[np.int64]) -> mx.array:
        """Add them: (R, width) -> (R, width) float32; counts (R,) tokens each answer has."""
        early = counts[self._rows][:, None] < self._min_tokens  # (B, 1)
        if early.any():
            added = mx.array(np.where(early, self._values, self._lasting))
        elif self._has_lasting:
            added = self._device_lasting
        else:
            return logits
        return logits.at[self._device_rows, self._device_ids].add(added)


def num_words(vocab_size: int) -> int:
    """How many uint32 words hold one bit for each of `vocab_size` tokens."""
    return -(-vocab_size // WORD_BITS)


def apply_bitmask(logits: mx.array, mask: mx.array) -> mx.array:
    """Give -inf to every token whose bit is 0; a row that forbids nothing has all its bits set.

    Args:
        logits: (R, V)
        mask: (R, ceil(V / 32)) uint32; token t is bit t % 32 of word t // 32.

    Returns:
        (R, V), dtype of logits.
    """
    num_rows, vocab_size = logits.shape
    assert mask.shape == (num_rows, num_words(vocab_size))
    assert mask.dtype == mx.uint32
    bit = mx.left_shift(mx.array(1, mx.uint32), mx.arange(WORD_BITS, dtype=mx.uint32))
    allowed = (mask[:, :, None] & bit) != 0  # (R, words, 32)
    allowed = allowed.reshape(num_rows, -1)[:, :vocab_size]
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))
