"""Attention of up to 8 query tokens a sequence over its pages and its tail. Knows no scheduler.

B = sequences, Q = query tokens each, H = KV heads, G = query heads per KV head, D = head_dim,
N = tokens of gathered pages, R = tail length (a ring of two pages).
"""

from typing import NamedTuple

import mlx.core as mx


class Softmax(NamedTuple):
    """How a layer makes weights of queries times keys, the scores of its attention."""

    scale: float  # multiplies the scores
    sinks: mx.array | None = None  # (heads,) logits that join each softmax without a value
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)


def gathered_attention(
    queries: mx.array,
    pages: tuple[mx.array, mx.array] | None,
    mask: mx.array | None,
    tail_keys: mx.array,
    tail_values: mx.array,
    tail_mask: mx.array,
    softmax: Softmax,
) -> mx.array:
    """Attention of B sequences over their gathered pages and their tails, in plain MLX.

    Args:
        queries: (B, Q, H * G, D).
        pages: keys (B, H, D, N) and values (B, H, N, D), padded; None: no sequence has pages.
        mask: additive (B, 1, 1 or Q, N) of the pages; None: all of them are visible.
        tail_keys, tail_values: (B, H, R, D).
        tail_mask: (B, 1, Q, R) additive.
        softmax: of the layer.

    Returns:
        (B, Q, H * G, D)
    """
    scale, sinks, soft_cap = softmax
    by_head, tail_scores = _tail_scores(queries, tail_keys, tail_mask, scale, soft_cap)
    scores = tail_scores
    if pages is not None:
        keys, values = pages
        scores = by_head @ keys  # (B, H, G * Q, N)
        if soft_cap is not None:
            scores = capped(scores, soft_cap)
        if mask is not None:
            group = by_head.shape[2] // mask.shape[-2]
            scores = scores + (mask if mask.shape[-2] == 1 else mx.tile(mask, (group, 1)))
        scores = mx.concatenate([scores, tail_scores], axis=-1)
    if sinks is None:
        weights = mx.softmax(scores, axis=-1, precise=True)
    else:
        weights = _softmax_with(sinks, scores, tail_keys.shape[1], queries.shape[1])
    if pages is None:
        return _by_token(weights @ tail_values, queries)
    page_weights, tail_weights = mx.split(weights, [keys.shape[-1]], axis=-1)
    return _by_token(mx.addmm(page_weights @ values, tail_weights, tail_values), queries)


def capped(scores: mx.array, soft_cap: float) -> mx.array:
    """soft_cap * tanh(scores / soft_cap)."""
    return mx.tanh(scores / soft_cap) * soft_cap


def _tail_scores(
    queries: mx.array,
    tail_keys: mx.array,
    tail_mask: mx.array,
    scale: float,
    soft_cap: float | None,
) -> tuple[mx.array, mx.array]:
    """Scaled queries (B, H, G * Q, D), and what they give with the tails (B, H, G * Q, R)."""
    kv_heads = tail_keys.shape[1]
    num_seqs, num_queries, num_heads, dim = queries.shape
    group = num_heads // kv_heads
    scaled = queries * scale
    if num_queries > 1:
        split = scaled.reshape(num_seqs, num_queries, kv_heads, group, dim)
        scaled = split.transpose(0, 2, 3, 1, 4)
        tail_mask = mx.tile(tail_mask, (1, 1, group, 1))
    by_head = scaled.reshape(num_seqs, kv_heads, group * num_queries, dim)
    scores = by_head @ tail_keys.swapaxes(-1, -2)
    if soft_cap is not None:
        scores = capped(scores, soft_cap)
    # Rounded before the mask, which is float32, as scores of pages are: a token must score the same
    # in the tail and, later, in a page.
    return by_head, scores + tail_mask


def _by_token(outputs: mx.array, queries: mx.array) -> mx.array:
    """(B, H, G * Q, D) float32 -> (B, Q, H * G, D) in the dtype of the queries, as kernels give it.

    Masks are float32, and what they are added to becomes that. Were it left so, all that follows
    would be computed in float32, and differ by what else is in the step.
    """
    outputs = outputs.astype(queries.dtype)
    num_seqs, num_queries, num_heads, _ = queries.shape
    kv_heads, dim = outputs.shape[1], outputs.shape[-1]
    if num_queries == 1:
        return outputs.reshape(num_seqs, 1, num_heads, dim)
    outputs = outputs.reshape(num_seqs, kv_heads, -1, num_queries, dim)
    return outputs.transpose(0, 3, 1, 2, 4).reshape(num_seqs, num_queries, num_heads, dim)


def _softmax_with(sinks: mx.array, scores: mx.array, kv_heads: int, num_queries: int) -> mx.array:
    """Softmax of scores (B, H, G * Q, N), where sinks (H * G,) take mass and give nothing."""
    column = mx.repeat(sinks.reshape(kv_heads, -1, 1), num_queries, axis=1)  # (H, G * Q, 1)
    column = mx.broadcast_to(column.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]
