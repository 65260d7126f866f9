"""Attention of a prompt over blocks of keys that lie in no pages; by the paged kernel."""

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx
import numpy as np

from .attention_plan import BLOCK, AttentionPlan, AttentionPlanner, tile_sizes
from .launch import MIN_NUMBERS
from .paged_attention import Softmax, paged_attention_on_metal
from .stored import PLAIN, Plane

EXPANDED_BYTES = 64 << 20  # of the keys and values of a block

LEAST_KEYS = 512  # of a block

Read = Callable[[int, int, mx.array | None], tuple[mx.array, mx.array]]


def attend_in_tiles(
    queries: mx.array, read: Read, start: int, value_dim: int, *, scale: float
) -> mx.array:
    """Attention of n consecutive queries over all positions up to each.

    What latent attention expands lies in no pages, and all of it at once would grow with the
    context. So each block attends by itself, and blocks are joined by the logarithms of their
    softmaxes' sums. n = queries of a chunk, H = heads, S = keys of a block.

    Args:
        queries: (n, H, D).
        read: positions from, to, and what must be there before -> their keys (H, S, D) and
            values (H, S, V).
        start: position of the first query.
        value_dim: V.

    Returns:
        (n, H, V) in the queries' dtype.
    """
    count, heads, key_dim = queries.shape
    outputs: mx.array | None = None
    sums: mx.array | None = None
    for first, stop in block_edges(start, count, heads * (key_dim + value_dim) * queries.itemsize):
        keys, values = read(first, stop, outputs)
        plan = _block_plan(count, start - first, stop - first, heads, key_dim, value_dim)
        attended, own_sums = paged_attention_on_metal(
            queries,
            _one(keys),
            _one(values),
            plan,
            Softmax(scale),
            value_dim=value_dim,
            log_sums=True,
        )
        if outputs is None or sums is None:
            outputs, sums = attended, own_sums
            continue
        both = mx.logaddexp(sums, own_sums)  # (n, H)
        before, share = mx.exp(sums - both)[..., None], mx.exp(own_sums - both)[..., None]
        outputs, sums = outputs * before + attended * share, both
    assert outputs is not None
    return outputs.astype(queries.dtype)


def block_edges(start: int, count: int, token_bytes: int) -> list[tuple[int, int]]:
    """Half-open ranges of key positions, one a block; all queries see the first key of each.

    Args:
        start: position of the first of `count` queries.
        token_bytes: of a key and its value, all heads together.
    """
    size = max(EXPANDED_BYTES // token_bytes // BLOCK * BLOCK, LEAST_KEYS)
    edges = list(range(0, start + 1, size))
    return list(zip(edges, [*edges[1:], start + count], strict=True))


@lru_cache(32)
def _block_plan(
    count: int, start: int, num_keys: int, heads: int, key_dim: int, value_dim: int
) -> AttentionPlan:
    """Of `count` queries from position `start` of a block on, which the block may end before."""
    num_blocks = -(-num_keys // BLOCK)
    planner = AttentionPlanner(
        counts=np.array([count], np.int32),
        sealed=np.array([num_blocks * BLOCK], np.int32),
        slots=np.zeros(1, np.int32),
        page_size=BLOCK,
        **tile_sizes(heads, heads, key_dim, value_dim),
    )
    pages = mx.array(np.arange(max(num_blocks, MIN_NUMBERS), dtype=np.int32)[None])
    return planner(np.array([start], np.int32), pages)


def _one(vectors: mx.array) -> Plane:
    """Vectors (H, S, dim) of one sequence, as one run of pages; no tail is read."""
    heads, _, dim = vectors.shape
    no_tail = _no_tail(heads * 2 * BLOCK, dim, vectors.dtype)
    return Plane(PLAIN, [vectors], [no_tail], dim, heads)


@lru_cache(8)
def _no_tail(count: int, dim: int, dtype: mx.Dtype) -> mx.array:
    zeros = mx.zeros((count, dim), dtype)
    mx.eval(zeros)
    return zeros
