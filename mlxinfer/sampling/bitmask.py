"""Forbids tokens by a bit mask, one bit a token. Knows nothing of the grammar that made it."""

import mlx.core as mx

WORD_BITS = 32


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
