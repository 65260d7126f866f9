"""Attention of up to 8 query tokens a sequence over its pages and its tail. Knows no scheduler.

B = sequences, Q = query tokens each, H = KV heads, G = query heads per KV head, D = head_dim,
N = tokens of a run of pages, R = tail length (a ring of two pages).
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

Runs = Sequence[mx.array]  # keys (H, D, N), or values (H, N, D), of consecutive pages


class Softmax(NamedTuple):
    """How a layer makes weights of queries times keys, the scores of its attention."""

    scale: float  # multiplies the scores
    sinks: mx.array | None = None  # (heads,) logits that join each softmax without a value
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)


def paged_attention(
    queries: mx.array,
    keys: Sequence[Runs],
    values: Sequence[Runs],
    run_masks: Sequence[mx.array | None],
    tail_keys: mx.array,
    tail_values: mx.array,
    tail_mask: mx.array,
    *,
    scale: float,
    sinks: mx.array | None = None,
    soft_cap: float | None = None,
) -> mx.array:
    """Plain-MLX twin: a softmax over the scores of every run of pages and of the tail.

    Args:
        queries: (B, Q, H * G, D).
        keys, values: for each sequence what of its pages may be seen, run by run.
        run_masks: for each sequence an additive mask (Q, tokens in its runs), or None: all visible.
        tail_keys, tail_values: (B, H, R, D).
        tail_mask: (B, 1, Q, R) additive.
        scale: multiplies the scores.
        sinks: (H * G,) logits that join each softmax without a value.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: they stay as they are.

    Returns:
        (B, Q, H * G, D)
    """
    by_head, tail_scores = _tail_scores(queries, tail_keys, tail_mask, scale, soft_cap)
    sink_column = None
    if sinks is not None:
        sink_column = _sink_column(sinks, tail_keys.shape[1], queries.shape[1])
    dim = tail_values.shape[-1]
    if len(keys) == 1 and keys[0]:  # nothing to take apart
        sequence = keys[0], values[0], run_masks[0], tail_scores, sink_column, dim
        weights, seen = _over_runs(by_head, *sequence, soft_cap)
        outputs = mx.addmm(seen, weights, tail_values)
    elif any(keys):
        rows = zip(_rows(by_head), keys, values, run_masks, _rows(tail_scores), strict=True)
        found = [_over_runs(*row, sink_column, dim, soft_cap) for row in rows]
        all_weights, all_seen = zip(*found, strict=True)
        outputs = mx.addmm(_joined(all_seen), _joined(all_weights), tail_values)
    else:
        outputs = _softmax(tail_scores, sink_column) @ tail_values
    return _by_token(outputs, queries)


def gathered_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | None,
    tail_keys: mx.array,
    tail_values: mx.array,
    tail_mask: mx.array,
    *,
    scale: float,
    sinks: mx.array | None = None,
    soft_cap: float | None = None,
) -> mx.array:
    """The same where the pages of all sequences were gathered into one array, padded.

    Args:
        keys, values: (B, H, D, N) and (B, H, N, D).
        mask: additive (B, 1, 1 or Q, N), or None: all visible.

    Returns:
        (B, Q, H * G, D)
    """
    by_head, tail_scores = _tail_scores(queries, tail_keys, tail_mask, scale, soft_cap)
    sink_column = None
    if sinks is not None:
        sink_column = _sink_column(sinks, tail_keys.shape[1], queries.shape[1])
    dim = values.shape[-1]
    pages = [keys], [values], mask
    weights, seen = _over_runs(by_head, *pages, tail_scores, sink_column, dim, soft_cap)
    return _by_token(mx.addmm(seen, weights, tail_values), queries)


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


def _rows(array: mx.array) -> list[mx.array]:
    """(B, ...) -> B times (1, ...): one operation, where indexing would take B."""
    return [array] if len(array) == 1 else list(mx.split(array, len(array)))


def _joined(rows: Sequence[mx.array]) -> mx.array:
    """B times (1, ...) -> (B, ...)."""
    return rows[0] if len(rows) == 1 else mx.concatenate(list(rows))


def _over_runs(
    queries: mx.array,
    keys: Runs,
    values: Runs,
    run_mask: mx.array | None,
    tail_scores: mx.array,
    sink_column: mx.array | None,
    value_dim: int,
    soft_cap: float | None,
) -> tuple[mx.array, mx.array]:
    """Weights of the tail (1, H, G * Q, R) of one sequence, and what it sees of its pages.

    The latter is (1, H, G * Q, D). What the tails give is a product for all sequences together.
    So it is with sequences of gathered pages: B in place of 1, and one run for all.
    """
    if not keys:
        nothing = mx.zeros((*queries.shape[:-1], value_dim), queries.dtype)
        return _softmax(tail_scores, sink_column), nothing
    scores, ends, end = [], [], 0
    for run in keys:
        found = queries @ run  # (1, H, G * Q, N)
        scores.append(found if soft_cap is None else capped(found, soft_cap))
        end += run.shape[-1]
        ends.append(end)
    if run_mask is not None:
        group = queries.shape[2] // run_mask.shape[-2]
        tiled = run_mask if run_mask.shape[-2] == 1 else mx.tile(run_mask, (group, 1))
        scores = [(scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)) + tiled]
    weights = _softmax(mx.concatenate([*scores, tail_scores], axis=-1), sink_column)
    *run_weights, tail_weights = mx.split(weights, ends, axis=-1)
    seen = run_weights[0] @ values[0]
    for weight, run in zip(run_weights[1:], values[1:], strict=True):
        seen = seen + weight @ run
    return tail_weights, seen


def _sink_column(sinks: mx.array, kv_heads: int, num_queries: int) -> mx.array:
    """(H * G,) -> (H, G * Q, 1)."""
    return mx.repeat(sinks.reshape(kv_heads, -1, 1), num_queries, axis=1)


def _softmax(scores: mx.array, sink_column: mx.array | None) -> mx.array:
    """Softmax over the last axis, with an optional sink that takes mass and gives nothing."""
    if sink_column is None:
        return mx.softmax(scores, axis=-1, precise=True)
    column = mx.broadcast_to(sink_column.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]
