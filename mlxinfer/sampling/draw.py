"""One draw a row: rows in blocks of 128 tokens, uniform numbers, and tokens by inversion.

Every row is padded to whole blocks, with at least one spare column. So a row begins at the same
offset modulo the vector width in every batch, and its values are rounded as they are when it is
alone. Entries of padded tables that stand for no token go to the spare column.

The random numbers are SplitMix64, used as a counter-based generator (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014). The n-th number of a stream needs none of the
earlier ones. So a seeded request draws the same numbers alone, in any batch, and after preemption.
"""

import secrets
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

BLOCK = 128
# A proposed token, and the weights (n,) float32 that it was drawn with, not normalised: tokens
# beyond n have none.
Drawn = tuple[int, mx.array]
# Streams of their own for each kind of number, so that proposals are independent of the rest.
PROPOSING = np.uint64(0x6A09E667F3BCC908)
RESIDUAL = np.uint64(0xBB67AE8584CAA73B)

# As arrays, which numpy takes up faster than scalars.
ONE, GOLDEN, MIX_1, MIX_2, SHIFT_1, SHIFT_2, SHIFT_3, LOW_BITS = np.array(
    [1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31, 40], np.uint64
)[:, None]
UNIT = np.array([2**-24], np.float32)


def padded_width(vocab_size: int) -> int:
    return (vocab_size // BLOCK + 1) * BLOCK


def row_padding(num_rows: int, vocab_size: int) -> mx.array:
    """(R, padded_width(V) - V) float32, all -inf: what pad_rows adds."""
    return mx.full((num_rows, padded_width(vocab_size) - vocab_size), -mx.inf, mx.float32)


def pad_rows(logits: mx.array, padding: mx.array | None = None) -> mx.array:
    """(R, V) of any float dtype -> (R, padded_width(V)) float32, -inf beyond the vocabulary.

    `padding` is a row_padding of the same shape that was kept.
    """
    if padding is None:
        padding = row_padding(*logits.shape)
    return mx.concatenate([logits.astype(mx.float32), padding], axis=-1)


def in_blocks(rows: mx.array) -> mx.array:
    """(R, width) -> (R, width / 128, 128)"""
    return rows.reshape(rows.shape[0], -1, BLOCK)


def largest_values(rows: mx.array, k: int) -> mx.array:
    """The k largest values of each row, largest last: (R, width) -> (R, k)."""
    if _through_blocks(rows, k):
        rows = _gather_blocks(rows, _leading_blocks(rows, k))
    return mx.sort(mx.topk(rows, k, axis=-1), axis=-1)


def largest_entries(rows: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest values of each row and their columns, largest first; ties: lower column first.

    Args:
        rows: (R, width) float32
        k: from 1 to width.

    Returns:
        values (R, k) float32, columns (R, k) int32
    """
    if not _through_blocks(rows, k):
        columns = mx.argsort(-rows, axis=-1)[:, :k]
        return mx.take_along_axis(rows, columns, axis=-1), columns.astype(mx.int32)
    # In the order of their ids, so that position among the candidates orders as columns do.
    blocks = mx.sort(_leading_blocks(rows, k), axis=-1)  # (R, k)
    candidates = _gather_blocks(rows, blocks)  # (R, k * 128)
    picked = mx.argsort(-candidates, axis=-1)[:, :k]
    columns = mx.take_along_axis(blocks, picked // BLOCK, axis=-1) * BLOCK + picked % BLOCK
    return mx.take_along_axis(candidates, picked, axis=-1), columns.astype(mx.int32)


def _through_blocks(rows: mx.array, k: int) -> bool:
    """Whether it pays to find the k best blocks of a row before sorting."""
    return 2 * k * BLOCK <= rows.shape[-1]


def _leading_blocks(rows: mx.array, k: int) -> mx.array:
    """(R, k) the k blocks with the largest maxima: the k largest values lie in them.

    A value outside is at most its block's maximum, and so at most each of k maxima inside.
    """
    return mx.argsort(-in_blocks(rows).max(axis=-1), axis=-1)[:, :k]


def _gather_blocks(rows: mx.array, blocks: mx.array) -> mx.array:
    """(R, k * 128) the values of the named blocks."""
    picked = mx.take_along_axis(in_blocks(rows), blocks[:, :, None], axis=1)  # (R, k, 128)
    return picked.reshape(rows.shape[0], -1)


def stream_of(seed: int | None) -> int:
    """The 64-bit stream of a seed; without one, a random stream."""
    if seed is None:
        return secrets.randbits(64)
    return int(_mixed(np.array([seed % 2**64], dtype=np.uint64))[0])


def uniforms(streams: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number a row in [0, 1), a multiple of 2**-24: exact in float32 and never 1.

    Args:
        streams: (R,) what stream_of returned for each row.
        counts: (R,) index of the token that the number is for.
    """
    bits = counts.astype(np.uint64)
    bits += ONE
    bits *= GOLDEN
    bits += streams
    return (_mixed(bits) >> LOW_BITS).astype(np.float32) * UNIT


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z ^= z >> SHIFT_1
    z *= MIX_1
    z ^= z >> SHIFT_2
    z *= MIX_2
    z ^= z >> SHIFT_3
    return z


def draw(weights: mx.array, uniforms: mx.array) -> mx.array:
    """The first token with a cumulated weight above uniform * total; never one of weight zero.

    Cumulated within blocks of 128 tokens and then over blocks: short sums lose less to rounding,
    and no row's sums depend on how many rows there are.

    Args:
        weights: (R, width) float32, at least 0, not normalised; width a multiple of 128.
        uniforms: (R,) float32 in [0, 1).

    Returns:
        (R,) uint32. Token 0 where a row has no weight at all.
    """
    blocks = in_blocks(weights)  # (R, B, 128)
    within = mx.cumsum(blocks, axis=-1)
    block_weights = within[..., -1]  # (R, B)
    before = mx.cumsum(block_weights, axis=-1, inclusive=False)
    until = before + block_weights
    target = uniforms[:, None] * until[:, -1:]  # (R, 1)
    block = _first_beyond(target, until, block_weights)  # (R, 1)
    rest = target - mx.take_along_axis(before, block, axis=-1)
    inside = mx.take_along_axis(within, block[..., None], axis=1)[:, 0]  # (R, 128)
    weights_inside = mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    return (block * BLOCK + _first_beyond(rest, inside, weights_inside))[:, 0]


def total_weight(weights: mx.array) -> mx.array:
    """(R, 1) sum of each row, in an order that does not depend on the number of rows."""
    block_weights = mx.cumsum(in_blocks(weights), axis=-1)[..., -1]
    return mx.cumsum(block_weights, axis=-1)[:, -1:]


def _first_beyond(target: mx.array, cumulated: mx.array, weights: mx.array) -> mx.array:
    """(R, 1) uint32 the first place of positive weight with a cumulated weight above `target`.

    Rounding may leave none (a uniform next to 1): then the last place of positive weight.
    """
    num_places = weights.shape[-1]
    rank = mx.where(cumulated > target, num_places, mx.arange(num_places, dtype=mx.int32))
    return mx.argmax(mx.where(weights > 0, rank, -1), axis=-1, keepdims=True)


def take_or_redraw(
    weights: mx.array,
    proposed: Sequence[Drawn],
    streams: NDArray[np.uint64],
    counts: NDArray[np.int64],
    vocab_size: int,
) -> mx.array:
    """The tokens of E rows that have a drawn proposal, by rejection sampling.

    A proposal x that was drawn from q is taken with probability min(1, p(x) / q(x)); else a token
    is drawn from the part of p that exceeds q. Then tokens have the distribution p, whatever q is
    (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, appendix
    A.1). A proposal without a distribution, such as an n-gram's, has a point mass as its q, and the
    rule becomes: draw from p, and take x where that gives x. The sampler does so with every other
    row.

    Args:
        weights: (E, width) float32 of the model's tokens, not normalised.
        proposed: (E,) the proposal of each row, a token of the model.
        streams: (E,) of random numbers.
        counts: (E,) index of each row's token in its answer.

    Returns:
        (E,) uint32
    """
    width = weights.shape[-1]
    token_ids = mx.array([token_id for token_id, _ in proposed], mx.uint32)[:, None]  # (E, 1)
    drawn = mx.stack([_fitted(token_weights, vocab_size, width) for _, token_weights in proposed])
    p, q = weights / total_weight(weights), drawn / total_weight(drawn)
    chances = mx.take_along_axis(p, token_ids, axis=1)[:, 0]
    drawn_chances = mx.take_along_axis(q, token_ids, axis=1)[:, 0]
    taken = mx.array(uniforms(streams, counts)) * drawn_chances < chances
    rest = draw(mx.maximum(p - q, 0), mx.array(uniforms(streams ^ RESIDUAL, counts)))
    return mx.where(taken, token_ids[:, 0], rest)


def _fitted(weights: mx.array, vocab_size: int, width: int) -> mx.array:
    """(width,) the weights of tokens that the model has, and 0 for the others."""
    fitted = weights[:vocab_size]
    return mx.pad(fitted, (0, width - len(fitted)))
