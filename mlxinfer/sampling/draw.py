"""One draw a row by inverting the cumulated probabilities in token-id order. Makes no uniforms."""

import mlx.core as mx

from .blocks import BLOCK, in_blocks


def draw(weights: mx.array, uniforms: mx.array) -> mx.array:
    """The first token whose cumulated weight exceeds uniform * total; never one of weight zero.

    Cumulated within blocks of 128 tokens and then over blocks: short sums lose less to rounding,
    and no row's sums depend on how many rows there are.

    Args:
        weights: (R, width) float32, at least 0, not normalised; width a multiple of 128.
        uniforms: (R, 1) float32 in [0, 1).

    Returns:
        (R,) int32. Token 0 where a row has no weight at all.
    """
    blocks = in_blocks(weights)  # (R, B, 128)
    within = mx.cumsum(blocks, axis=-1)
    block_weights = within[..., -1]  # (R, B)
    before = mx.cumsum(block_weights, axis=-1, inclusive=False)
    target = uniforms * (before[:, -1:] + block_weights[:, -1:])  # (R, 1)
    block = _first_beyond(target, before + block_weights, block_weights)[:, None]  # (R, 1)
    rest = target - mx.take_along_axis(before, block, axis=-1)
    inside = mx.take_along_axis(within, block[..., None], axis=1)[:, 0]  # (R, 128)
    weights = mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    return block[:, 0] * BLOCK + _first_beyond(rest, inside, weights)


def total_weight(weights: mx.array) -> mx.array:
    """(R, 1) sum of each row, in an order that does not depend on the number of rows."""
    block_weights = mx.cumsum(in_blocks(weights), axis=-1)[..., -1]
    return mx.cumsum(block_weights, axis=-1)[:, -1:]


def _first_beyond(target: mx.array, cumulated: mx.array, weights: mx.array) -> mx.array:
    """(R,) int32 the first column of positive weight whose cumulated weight exceeds `target`.

    Rounding may leave none (a uniform next to 1): then the last column of positive weight.
    """
    num_columns = weights.shape[-1]
    columns = mx.arange(num_columns, dtype=mx.int32)
    rank = mx.where(cumulated > target, num_columns, columns)
    return mx.argmax(mx.where(weights > 0, rank, -1), axis=-1).astype(mx.int32)
