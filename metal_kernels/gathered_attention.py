"""Attention over gathered pages and tails in plain MLX: what runs where no kernel may be used.

B = sequences, Q = query tokens of each, n = pages, P = page_size, N = n * P, R = 2 * P, the ring
of a tail, H = KV heads, G = query heads per KV head, D = key dim, V = value dim.
"""

import mlx.core as mx

from .paged_attention import Softmax
from .stored import Plane

Masks = tuple[mx.array | None, mx.array]
GATHERED, FUSED = "gathered pages, scores kept", "gathered pages, MLX's attention"  # ways


def gathered_pages(
    keys: Plane, values: Plane, ids: mx.array, page_size: int
) -> tuple[mx.array, mx.array]:
    """Keys and values (H, B, N, D) of pages `ids` (B, n).

    Vectors that hold both are gathered and decoded once.
    """
    by_head = []
    for plane in (keys,) if keys.pages is values.pages else (keys, values):
        # mx.take builds a shorter graph, and takes the CPU nine times as long to evaluate.
        parts = [mx.unflatten(part, 1, (-1, page_size))[:, ids] for part in plane.pages]
        vectors = plane.fmt.decode(parts, plane.dtype) if plane.fmt.bits else parts[0]
        by_head.append(mx.flatten(vectors, 2, 3))  # (H, B, N, W)
    page_keys, page_values = by_head[0], by_head[-1]
    if keys.dim is not None:
        page_keys = page_keys[..., keys.first : keys.first + keys.dim]
    if values.dim is not None:
        page_values = page_values[..., values.first : values.first + values.dim]
    return page_keys, page_values


def gathered_attention(
    queries: mx.array,
    pages: tuple[mx.array, mx.array] | None,
    tails: tuple[mx.array, mx.array],
    masks: Masks,
    softmax: Softmax,
) -> mx.array:
    """Attention of B sequences over their gathered pages and their tails.

    Args:
        queries: (B * Q, H * G, D), those of a sequence one after another.
        pages: keys (B, H, N, D) and values (B, H, N, V), padded; None: no sequence has pages.
        tails: keys (B, H, R, D) and values (B, H, R, V).
        masks: of pages and of tails, as for `attention_weights`.

    Returns:
        (B * Q, H * G * V) in the dtype of the queries, as kernels give it. Masks make the numbers
        float32. Were they left so, all that follows would be, and differ by what else is in the
        step.
    """
    mask, tail_mask = masks
    keys = None if pages is None else pages[0].swapaxes(-1, -2)
    weights = attention_weights(queries, keys, mask, tails[0], tail_mask, softmax)
    if pages is None:
        outputs = weights @ tails[1]
    else:
        page_weights, tail_weights = mx.split(weights, [pages[1].shape[2]], axis=-1)
        outputs = mx.addmm(page_weights @ pages[1], tail_weights, tails[1])
    outputs = outputs.astype(queries.dtype)
    num_queries = tail_mask.shape[2]
    if num_queries > 1:
        outputs = mx.unflatten(outputs, 2, (-1, num_queries)).transpose(0, 3, 1, 2, 4)
    return outputs.reshape(len(queries), -1)


def gathered_fused(
    queries: mx.array,
    pages: tuple[mx.array, mx.array] | None,
    tails: tuple[mx.array, mx.array],
    mask: mx.array,
    softmax: Softmax,
) -> mx.array:
    """The same by MLX's own attention, which keeps no scores where MLX has a kernel for it.

    Pages and tails become one array of keys and one of values. There is no soft cap.

    Args:
        queries, pages, tails, softmax: as for `gathered_attention`.
        mask: see `whole_mask`.
    """
    num_seqs, _, num_queries, _ = mask.shape
    keys, values = tails
    if pages is not None:
        keys, values = (mx.concatenate([a, b], axis=2) for a, b in zip(pages, tails, strict=True))
    by_head = queries.reshape(num_seqs, num_queries, *queries.shape[1:]).swapaxes(1, 2)
    sinks = None if softmax.sinks is None else softmax.sinks.astype(queries.dtype)
    outputs = mx.fast.scaled_dot_product_attention(  # (B, H * G, Q, V)
        by_head, keys, values, scale=softmax.scale, mask=mask, sinks=sinks
    )
    return outputs.swapaxes(1, 2).reshape(len(queries), -1)


def whole_mask(
    mask: mx.array | None, tail_mask: mx.array, pages: tuple[mx.array, mx.array] | None
) -> mx.array:
    """(B, 1, Q, N + R) bool: what is seen of pages, then of tails.

    Args:
        mask: additive (B, 1, 1 or Q, N) of the pages; None: all of them are seen.
        tail_mask: (B, 1, Q, R) additive.
        pages: keys and values; None: no sequence has pages.
    """
    if pages is None:
        return tail_mask == 0
    of_pages = (*tail_mask.shape[:3], pages[0].shape[2])
    seen = mx.ones(of_pages, mx.bool_) if mask is None else mx.broadcast_to(mask == 0, of_pages)
    return mx.concatenate([seen, tail_mask == 0], axis=-1)


def attention_weights(
    queries: mx.array,
    page_keys: mx.array | None,
    mask: mx.array | None,
    tail_keys: mx.array,
    tail_mask: mx.array,
    softmax: Softmax,
) -> mx.array:
    """Weights that B sequences give their gathered pages and their tails, in plain MLX.

    Scores of the tail are rounded before the mask, which is float32, as scores of pages are: a
    token must score the same in the tail and, later, in a page.

    Args:
        queries: (B * Q, H * G, D), those of a sequence one after another.
        page_keys: (B, H, D, N), padded; None: no sequence has pages.
        mask: additive (B, 1, 1 or Q, N) of the pages; None: all of them are visible.
        tail_keys: (B, H, R, D).
        tail_mask: (B, 1, Q, R) additive.

    Returns:
        (B, H, G * Q, N + R), or without pages (B, H, G * Q, R).
    """
    scale, sinks, soft_cap = softmax
    num_seqs, kv_heads = tail_keys.shape[:2]
    num_queries, group = tail_mask.shape[2], queries.shape[1] // kv_heads
    by_head = queries * scale
    if num_queries > 1:  # by token, then by head of a sequence
        by_head = by_head.reshape(num_seqs, num_queries, kv_heads, group, -1)
        by_head, tail_mask = by_head.transpose(0, 2, 3, 1, 4), mx.tile(tail_mask, (group, 1))
        mask = mask if mask is None or mask.shape[2] == 1 else mx.tile(mask, (group, 1))
    by_head = by_head.reshape(num_seqs, kv_heads, group * num_queries, -1)
    scores = by_head @ tail_keys.swapaxes(-1, -2)
    scores = (scores if soft_cap is None else capped(scores, soft_cap)) + tail_mask
    if page_keys is not None:
        of_pages = by_head @ page_keys  # (B, H, G * Q, N)
        of_pages = of_pages if soft_cap is None else capped(of_pages, soft_cap)
        scores = mx.concatenate([of_pages if mask is None else of_pages + mask, scores], axis=-1)
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    return _softmax_with(sinks, scores, num_queries)


def _softmax_with(sinks: mx.array, scores: mx.array, num_queries: int) -> mx.array:
    """Softmax of scores (B, H, G * Q, N), where sinks (H * G,) take mass and give nothing."""
    column = mx.repeat(sinks.reshape(scores.shape[1], -1, 1), num_queries, axis=1)  # (H, G * Q, 1)
    column = mx.broadcast_to(column.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)[..., :-1]


def capped(scores: mx.array, soft_cap: float) -> mx.array:
    """soft_cap * tanh(scores / soft_cap)."""
    return mx.tanh(scores / soft_cap) * soft_cap
