"""Attention of prompts over pages: flash attention in tiles, for chunks of several sequences.

Where MLX has no fused attention (head dims above 128 for more than 8 queries), and where keys and
values are stored in codes: nothing is gathered, no score leaves a threadgroup, and what a launch
takes beside its outputs does not grow with the context. Algorithm: FlashAttention-2,
arXiv:2307.08691. Knows arrays; no step, no scheduler.
"""

import mlx.core as mx

from .attention_plan import AttentionPlan
from .attention_shape import prefill_shape
from .paged_attention_kernel import paged_attention_on_metal
from .prefill_plan import Chunks
from .stored import Stored


def prefill_attention_on_metal(
    queries: mx.array,
    keys: Stored,
    values: Stored,
    chunks: Chunks,
    *,
    scale: float,
    sink_logits: mx.array | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
) -> mx.array:
    """Attention of consecutive queries of each chunk over its sequence's pages and tail.

    Args:
        queries: (T, H * G, D), those of the first chunk first.
        keys: plain, or codes of 8 or 4 bits with scales and biases.
        values: likewise; another format than the keys' is fine.
        chunks: of the step; their keys and values are written.
        scale: multiplies the scores.
        sink_logits: (H * G,) logits that join each softmax without a value.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        value_dim: V where it differs from D.

    Returns:
        (T, H * G, V) in the queries' dtype.

    Raises:
        ValueError: no kernel has these sizes.
    """
    value_dim = value_dim or queries.shape[-1]
    (outputs,) = paged_attention_on_metal(
        queries,
        keys,
        values,
        tiled(chunks, queries, keys, value_dim),
        scale=scale,
        sink_logits=sink_logits,
        soft_cap=soft_cap,
        value_dim=value_dim,
    )
    return outputs


def tiled(chunks: Chunks, queries: mx.array, keys: Stored, value_dim: int) -> AttentionPlan:
    """The plan of chunks for a layer with such queries, keys and values.

    Raises:
        ValueError: a tile has no room for the query heads of one token.
    """
    _, num_heads, key_dim = queries.shape
    kv_heads = keys.pages[0].shape[0]
    count = tile_queries(num_heads // kv_heads, key_dim=key_dim, value_dim=value_dim)
    if count == 0:
        raise ValueError(f"{num_heads // kv_heads} query heads of a KV head do not fit a tile")
    rows = count * (num_heads // kv_heads)
    partial_bytes = kv_heads * rows * (value_dim + 2) * 4
    return chunks.plan(count, kv_heads=kv_heads, partial_bytes=partial_bytes)


def tile_queries(group: int, *, key_dim: int, value_dim: int) -> int:
    """Query tokens of a tile, for `group` query heads per KV head."""
    return prefill_shape(key_dim=key_dim, value_dim=value_dim).rows // group
