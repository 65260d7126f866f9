"""The plain-MLX twin of the paged attention kernels: same arguments, one sequence at a time.

Simple rather than fast: tests and the check on a new GPU compare the kernels with it. In float32
throughout. What runs where there is no Metal is `paged_attention`, over runs of pages.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .attention_plan import AttentionPlan
from .stored import Stored, numbers_of

HIDDEN = float(np.finfo(np.float32).min)


def paged_attention_gathered(
    queries: mx.array,
    keys: Stored,
    values: Stored,
    plan: AttentionPlan,
    *,
    scale: float,
    sink_logits: mx.array | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    log_sums: bool = False,
) -> list[mx.array]:
    """As `paged_attention_on_metal`, which see."""
    value_dim = value_dim or queries.shape[-1]
    page_size, window, sinks, *_ = plan.sizes.tolist()
    found = []
    tables = np.array(plan.pages)
    for span, place in zip(plan.spans, plan.tables, strict=True):
        table = tables[place]
        row, start, stop, sealed, slot, *_ = (int(field) for field in span)
        own = queries[row : row + stop - start].astype(mx.float32)  # (Q, H * G, D)
        query_positions = np.arange(start, stop, dtype=np.int32)[:, None]
        positions = held_positions(table, stop, sealed, page_size)
        visible = _sees(query_positions, positions[None], window, sinks)
        positions, visible = positions[visible.any(axis=0)], visible[:, visible.any(axis=0)]
        index = token_index(table, positions, sealed, page_size)
        found.append(
            attend(
                own,
                gathered(keys, page_size, slot, index, own.shape[-1]),
                gathered(values, page_size, slot, index, value_dim),
                mx.array(np.where(visible, 0.0, HIDDEN).astype(np.float32)),
                scale=scale,
                sink_logits=sink_logits,
                soft_cap=soft_cap,
            )
        )
    found = [found[i] for i in np.argsort(plan.spans[:, 0])]  # by their rows
    outputs = mx.concatenate([outputs for outputs, _ in found]).astype(queries.dtype)
    return [outputs, mx.concatenate([sums for _, sums in found])] if log_sums else [outputs]


def held_positions(
    table: NDArray[np.int32], stop: int, sealed: int, page_size: int
) -> NDArray[np.int32]:
    """Positions before `stop` with vectors that are still there."""
    positions = np.arange(stop, dtype=np.int32)
    page = table[np.minimum(positions // page_size, len(table) - 1)]
    return positions[(positions >= sealed) | (page >= 0)]


def token_index(
    table: NDArray[np.int32], positions: NDArray[np.int32], sealed: int, page_size: int
) -> tuple[mx.array, mx.array]:
    """Tokens of the pool, and of a tail's ring, that hold `positions`, in order."""
    old, new = positions[positions < sealed], positions[positions >= sealed]
    tokens = table[old // page_size] * page_size + old % page_size
    return mx.array(tokens), mx.array(new % (2 * page_size))


def gathered(
    stored: Stored, page_size: int, slot: int, index: tuple[mx.array, mx.array], dim: int
) -> mx.array:
    """(H, tokens, dim) float32: of the pages, then of the tail."""
    tokens, ring = index
    own = slice(stored.tail_head, stored.tail_head + len(stored.pages[0]))
    shape = (-1, stored.tail_heads, 2 * page_size)
    parts = [
        mx.concatenate(
            [pages[:, tokens], tails.reshape(*shape, tails.shape[-1])[slot, own][:, ring]], axis=1
        )
        for pages, tails in zip(stored.pages, stored.tails, strict=True)
    ]
    return numbers_of(stored, parts, dim)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    *,
    scale: float,
    sink_logits: mx.array | None,
    soft_cap: float | None,
) -> tuple[mx.array, mx.array]:
    """Outputs (Q, H * G, V) and log-sum-exps (Q, H * G) of one sequence.

    Args:
        queries: (Q, H * G, D).
        keys, values: (H, N, D) and (H, N, V).
        mask: (Q, N) additive.
    """
    num_heads = queries.shape[1]
    repeats = num_heads // len(keys)
    keys, values = mx.repeat(keys, repeats, axis=0), mx.repeat(values, repeats, axis=0)
    scores = (queries.swapaxes(0, 1) @ keys.swapaxes(1, 2)) * scale  # (H * G, Q, N)
    if soft_cap is not None:
        scores = soft_cap * mx.tanh(scores / soft_cap)
    scores = scores + mask
    log_sum_exp = mx.logsumexp(scores, axis=-1, keepdims=True)  # (H * G, Q, 1)
    if sink_logits is not None:
        column = sink_logits.astype(mx.float32).reshape(num_heads, 1, 1)
        log_sum_exp = mx.logaddexp(log_sum_exp, column)
    outputs = mx.exp(scores - log_sum_exp) @ values  # (H * G, Q, V)
    return outputs.swapaxes(0, 1), log_sum_exp.squeeze(-1).T


def _sees(
    queries: NDArray[np.int32], keys: NDArray[np.int32], window: int, sinks: int
) -> NDArray[np.bool_]:
    return (keys <= queries) & ((keys > queries - window) | (keys < sinks))
