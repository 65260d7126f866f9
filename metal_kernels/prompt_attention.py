"""A prompt's attention in plain MLX: over all keys at once, or over blocks of queries and keys.

MLX's fused attention on Metal keeps no scores. It takes more than 8 queries at head dims up to 128
(`FUSED_DIMS`). At 192 and 256 it has kernels too, but prefers to materialise the scores, except in
one case on the newest GPUs (mlx/backend/metal/scaled_dot_product_attention.cpp, 0.32.2).
`force_fused` has it use them; self-checks of prompts' kernels time whether that is faster. Other
attention is done in blocks of queries and keys. Then neither the scores nor the decoded part of the
cache grow with the context. With several blocks of keys, the softmax is updated block by block
(FlashAttention-2, arXiv:2307.08691).

n = queries, H = KV heads, S = keys, V = value dim.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .chips import FORCED_DIMS, FUSED_DIMS
from .gathered_attention import capped
from .paged_attention import Softmax

WHOLE, BLOCKS = "all keys at once", "blocks of keys"  # ways
KEY_BLOCK = 2048
QUERY_BLOCK = 128  # queries that attend together where MLX keeps their scores
LOWEST = -1e30  # a peak before anything was seen
MOST_DECODED = 256 << 20  # bytes of a layer's keys and values, decoded for `WHOLE`
FEW_QUERIES = 8  # up to here MLX has other kernels, which do not serve all numbers of heads

Ints = NDArray[np.int32]
Read = Callable[[int, int, mx.array | None], tuple[mx.array, mx.array]]
"""`read(start, stop, after)`: keys (H, S, D) and values (H, S, V) of tokens [start, stop), not read
before `after` is there."""
Seen = Callable[[slice, Ints], mx.array | bool]
"""`seen(rows, positions)`: which of some queries see which keys: (queries, keys) bool, or all, or
none of them."""

Running = tuple[mx.array, mx.array, mx.array]
"""A softmax over the keys so far, of H heads and some rows of each, float32: outputs (H, rows, V)
that are not divided by the totals, peaks (H, rows, 1) and totals (H, rows, 1)."""


def ways_over_all(
    dims: tuple[int, int], num_queries: int, decoded_bytes: int, softmax: Softmax
) -> tuple[str, ...]:
    """The ways for queries that see all tokens before them, the first where nothing was timed.

    Args:
        num_queries: of the prompt, in this step.
        decoded_bytes: of all keys and values, where they are not read as they are stored.
    """
    if softmax.soft_cap is not None or decoded_bytes > MOST_DECODED:
        return (BLOCKS,)
    if is_fused(*dims):
        return WHOLE, BLOCKS
    forced = dims[0] == dims[1] and dims[0] in FORCED_DIMS and num_queries > FEW_QUERIES
    return (BLOCKS, WHOLE) if forced else (BLOCKS,)


def is_fused(key_dim: int, value_dim: int) -> bool:
    """Whether MLX on Metal attends to keys and values of these dims without keeping scores."""
    return key_dim == value_dim and key_dim in FUSED_DIMS


def attend_to_all(
    queries: mx.array, keys: mx.array, values: mx.array, softmax: Softmax
) -> mx.array:
    """Queries (heads, n, D), the last of all tokens, over keys (H, S, D) and values (H, S, V).

    On Metal no scores are kept.

    Returns:
        (heads, n, V).

    Raises:
        ValueError: MLX has no fused attention for this.
    """
    forced = mx.metal.is_available() and not is_fused(queries.shape[-1], values.shape[-1])
    output = mx.fast.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        scale=softmax.scale,
        mask="causal",
        sinks=softmax.sinks,
        force_fused=forced,
    )
    return output[0]


def attend_over_blocks(
    queries: mx.array, read: Read, positions: Ints, seen: Seen, softmax: Softmax
) -> mx.array:
    """Queries (heads, n, D) over keys at `positions` (S,); each block of these is read once.

    Returns:
        (heads, n, V).
    """
    scale, sinks, soft_cap = softmax
    queries = queries * scale
    num_heads, count, _ = queries.shape
    places = [
        slice(first, min(first + QUERY_BLOCK, count)) for first in range(0, count, QUERY_BLOCK)
    ]
    states: list[Running | None] = [None] * len(places)
    after: mx.array | None = None
    for start in range(0, len(positions), KEY_BLOCK):
        key_positions = positions[start : start + KEY_BLOCK]
        keys, values = read(start, start + len(key_positions), after)
        for i, place in enumerate(places):
            visible = seen(place, key_positions)
            if visible is False:
                continue
            state = states[i] or _begun(queries[:, place], values, sinks)
            some = queries[:, place] if after is None else mx.depends(queries[:, place], after)
            states[i] = state = _joined(state, some, keys, values, visible, soft_cap)
            after = state[0]
    outputs = [state[0] / state[2] for state in states if state is not None]
    return mx.concatenate(
        [some.reshape(num_heads, -1, some.shape[-1]) for some in outputs], axis=1
    ).astype(queries.dtype)


def sees_before(start: int) -> Seen:
    """Of queries at positions from `start` on that see themselves and all before."""

    def seen(place: slice, keys: Ints) -> mx.array | bool:
        first, last = start + place.start, start + place.stop - 1
        if keys[-1] <= first:
            return True
        if keys[0] > last:
            return False
        return mx.array(keys[None] <= np.arange(first, last + 1, dtype=np.int32)[:, None])

    return seen


def _begun(queries: mx.array, values: mx.array, sinks: mx.array | None) -> Running:
    """The running softmax before any key. A sink logit is already in it."""
    num_heads, count, _ = queries.shape
    kv_heads, _, dim = values.shape
    shape = kv_heads, num_heads // kv_heads * count, 1
    outputs = mx.zeros((*shape[:2], dim), mx.float32)
    if sinks is None:
        return outputs, mx.full(shape, LOWEST), mx.zeros(shape, mx.float32)
    peaks = mx.repeat(sinks.astype(mx.float32), count).reshape(shape)
    return outputs, peaks, mx.ones(shape, mx.float32)


def _joined(
    state: Running,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: mx.array | bool,
    soft_cap: float | None,
) -> Running:
    """The running softmax after more keys.

    Queries (heads, n, D), keys (H, S, D), values (H, S, V).
    """
    kv_heads, num_keys, _ = keys.shape
    _, count, dim = queries.shape
    outputs, old_peaks, old_totals = state
    scores = queries.reshape(kv_heads, -1, dim) @ keys.swapaxes(1, 2)
    scores = (scores if soft_cap is None else capped(scores, soft_cap)).astype(mx.float32)
    if isinstance(seen, mx.array):
        by_query = scores.reshape(kv_heads, -1, count, num_keys)
        scores = mx.where(seen, by_query, -mx.inf).reshape(scores.shape)
    peaks = mx.maximum(old_peaks, scores.max(axis=-1, keepdims=True))
    weights, fade = mx.exp(scores - peaks), mx.exp(old_peaks - peaks)
    added = weights.astype(values.dtype) @ values
    totals = old_totals * fade + weights.sum(axis=-1, keepdims=True)
    # Else totals wait for the last block, and the weights of all blocks with them.
    return mx.depends(outputs * fade + added, totals), peaks, totals
