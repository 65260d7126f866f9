"""Rejection sampling of proposals that were drawn: the distribution of the model, more accepted.

A proposal x that was drawn from q is taken with probability min(1, p(x) / q(x)); else a token is
drawn from the part of p that exceeds q. Then tokens have the distribution p, whatever q is
(Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, appendix A.1).
A proposal without a distribution, such as an n-gram's, has a point mass as its q, and the rule
becomes: draw from p, and take x where that gives x. The sampler does so with every other row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .draw import draw, total_weight, uniforms

# Streams of their own for each kind of number, so that proposals are independent of the rest.
PROPOSING = np.uint64(0x6A09E667F3BCC908)
RESIDUAL = np.uint64(0xBB67AE8584CAA73B)


class DrawnToken(NamedTuple):
    """A proposed token, and the weights that it was drawn with."""

    token_id: int
    weights: mx.array  # (n,) float32, at least 0, not normalised; tokens beyond n have none


def take_or_redraw(
    weights: mx.array,
    proposed: Sequence[DrawnToken],
    streams: NDArray[np.uint64],
    counts: NDArray[np.int64],
    vocab_size: int,
) -> mx.array:
    """The tokens of E rows that have a drawn proposal.

    Args:
        weights: (E, width) float32 of the model's tokens, not normalised.
        proposed: (E,) the proposal of each row, a token of the model.
        streams: (E,) of random numbers.
        counts: (E,) index of each row's token in its answer.
        vocab_size: of the model.

    Returns:
        (E,) uint32
    """
    token_ids = mx.array([drawn.token_id for drawn in proposed], mx.uint32)[:, None]  # (E, 1)
    drawn = mx.stack([_fitted(each.weights, vocab_size, weights.shape[-1]) for each in proposed])
    p, q = weights / total_weight(weights), drawn / total_weight(drawn)
    chances = mx.take_along_axis(p, token_ids, axis=1)[:, 0]
    drawn_chances = mx.take_along_axis(q, token_ids, axis=1)[:, 0]
    taken = mx.array(uniforms(streams, counts)) * drawn_chances < chances
    rest = draw(mx.maximum(p - q, 0), mx.array(uniforms(streams ^ RESIDUAL, counts)))
    return mx.where(taken, token_ids[:, 0], rest)


def _fitted(weights: mx.array, vocab_size: int, width: int) -> mx.array:
    """(width,) the weights of tokens that the model has, and 0 for the others."""
    kept = weights[:vocab_size]
    return mx.pad(kept, (0, width - len(kept)))
