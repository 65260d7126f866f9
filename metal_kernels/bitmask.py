"""Tokens forbidden by a bit mask, one bit a token. Knows nothing of the grammar that made it.

R = rows, V = vocabulary.
"""

import mlx.core as mx

from .launch import MetalKernel

WORD_BITS = 32
THREADS = 256

KERNEL = MetalKernel(
    name="bitmask",
    inputs=("logits", "mask"),
    outputs=("masked",),
    body="""
        bitmask<T>(logits, mask, masked, thread_position_in_grid.xy, uint(logits_shape[1]),
                   uint(mask_shape[1]));
    """,
)


def bitmask(logits: mx.array, mask: mx.array) -> mx.array:
    """Give -inf to every token with the bit 0, in one dispatch.

    Args:
        logits: (R, V) float32, float16 or bfloat16.
        mask: (R, ceil(V / 32)) uint32; token t is bit t % 32 of word t // 32.

    Returns:
        (R, V), dtype of logits.
    """
    num_rows, vocab_size = logits.shape
    check_mask(logits, mask)
    (masked,) = KERNEL(
        [logits, mask],
        template=[("T", logits.dtype)],
        grid=(vocab_size, num_rows, 1),
        threadgroup=(min(THREADS, vocab_size), 1, 1),
        output_shapes=[logits.shape],
        output_dtypes=[logits.dtype],
    )
    return masked


def bitmask_twin(logits: mx.array, mask: mx.array) -> mx.array:
    """The same in plain MLX."""
    check_mask(logits, mask)
    return mx.where(allowed(mask, logits.shape[1]), logits, mx.array(-mx.inf, logits.dtype))


def allowed(mask: mx.array, vocab_size: int) -> mx.array:
    """(R, W) words -> (R, vocab_size) bool; tokens without a bit are forbidden."""
    bit = mx.left_shift(mx.array(1, mx.uint32), mx.arange(WORD_BITS, dtype=mx.uint32))
    bits = ((mask[:, :, None] & bit) != 0).reshape(mask.shape[0], -1)  # (R, 32 W)
    missing = vocab_size - bits.shape[1]
    return mx.pad(bits, [(0, 0), (0, missing)]) if missing > 0 else bits[:, :vocab_size]


def check_mask(logits: mx.array, mask: mx.array) -> None:
    """One word for every 32 tokens of every row."""
    num_rows, vocab_size = logits.shape
    assert mask.shape == (num_rows, -(-vocab_size // WORD_BITS)), (mask.shape, logits.shape)
    assert mask.dtype == mx.uint32
