"""Tokens forbidden by a bit mask, one bit a token. Knows nothing of the grammar that made it.

R = rows, V = vocabulary.
"""

from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from .launch import MAX_LAUNCHES, Launch, MetalKernel
from .variants import Case, Kind, Variant, dtype_name

WORD_BITS = 32
THREADS = 256
SMALL_VOCAB, LARGE_VOCAB = 1_501, 151_936
MASKED_ROWS = 8

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
    check_mask(logits, mask)
    (masked,) = _launch(logits.shape, logits.dtype)([logits, mask])
    return masked


@lru_cache(MAX_LAUNCHES)
def _launch(shape: tuple[int, int], dtype: mx.Dtype) -> Launch:
    num_rows, vocab_size = shape
    return Launch(
        KERNEL,
        template=[("T", dtype)],
        grid=(vocab_size, num_rows, 1),
        threadgroup=(min(THREADS, vocab_size), 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )


def bitmask_twin(logits: mx.array, mask: mx.array) -> mx.array:
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


@cache
def bitmask_variant(dtype: mx.Dtype) -> Variant:
    """The kernel for logits of this dtype."""
    return Variant.of("bitmask", dtype=dtype_name(dtype))


def _masking(variant: Variant, num_rows: int, vocab_size: int) -> Case:
    logits = random_logits(num_rows, vocab_size).astype(variant.dtype)
    mask = random_mask(num_rows, vocab_size)
    return Case(lambda: [bitmask(logits, mask)], lambda: [bitmask_twin(logits, mask)], (0.0,))


def random_logits(num_rows: int, vocab_size: int) -> mx.array:
    """(R, V) float32, the same every time."""
    rng = np.random.default_rng(vocab_size)
    return mx.array(rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))


def random_mask(num_rows: int, vocab_size: int) -> mx.array:
    """(R, ceil(V / 32)) uint32, the same every time."""
    rng = np.random.default_rng(num_rows)
    words = rng.integers(0, 2**32, (num_rows, -(-vocab_size // WORD_BITS)), dtype=np.uint32)
    return mx.array(words)


BITMASK = Kind(
    name="bitmask",
    files=("bitmask.metal", "bitmask.py"),
    case=lambda variant: _masking(variant, MASKED_ROWS, SMALL_VOCAB),
    timed=lambda variant, sequences, _: _masking(variant, sequences, LARGE_VOCAB),
    registers=lambda variant: 12,
    samples=tuple(Variant.of("bitmask", dtype=d) for d in ("float32", "bfloat16", "float16")),
)
