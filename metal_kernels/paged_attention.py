"""Attention of up to 8 query tokens a sequence over its pages and its tail. Knows no scheduler.

`gathered_attention` serves machines without Metal, over runs of pages. `paged_attention_on_metal`
launches the kernels, in one pass or two. `paged_attention_gathered` is the simple twin of the
kernels in plain MLX and float32: tests and the check on a new GPU compare the kernels with it.

B = sequences, Q = query tokens each, T = query tokens of all sequences, H = KV heads,
G = query heads per KV head, D = key dim, V = value dim, N = tokens of gathered pages,
R = tail length (a ring of two pages).
"""

from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .attention_plan import AttentionPlan
from .attention_reduce import (
    NO_FIGURES,
    Attention,
    includes,
    output_sizes,
    partial_sizes,
    reduction,
    sink_names,
)
from .attention_shape import Shape, prefill_shape, threadgroup_shape
from .launch import Launch, MetalKernel, TemplateValue
from .stored import KVFormat, Stored, numbers_of, part_names, plane_text


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


HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
LARGE_DIM = 512  # of keys and values both, in 16 bits
MAX_ROWS = 128  # query tokens of a sequence times query heads per KV head
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MAX_PASSES = 64  # with launches that are remembered: steps like the one before make the same

STREAMED = """
  constexpr int QUERIES = FRAGMENTS * 8 * KEY_DIM * sizeof(T) / sizeof(float4);
  constexpr int FIGURES = STREAMS * FRAGMENTS * 8 * 2;
  constexpr int SLICES = STREAMS * 8 * slice_pitch(VALUE_DIM);
  threadgroup float4 shared_queries[QUERIES];
  threadgroup float shared_figures[FIGURES];
  threadgroup float slices[SLICES];
  paged_attention<KEY_DIM, VALUE_DIM, FRAGMENTS, SPLIT, SINKS, LOG_SUMS>(ARGUMENTS,
      reinterpret_cast<threadgroup T*>(shared_queries), shared_figures, slices,
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
TILED = """
  constexpr int MERGED = SIMD_GROUPS * 8 * (FRAGMENTS * 2 + slice_pitch(VALUE_DIM));
  constexpr int DIMS = HALVES == 1 ? KEY_DIM + VALUE_DIM : KEY_DIM;
  constexpr int TILE =
      scratch_floats(DIMS, sizeof(T), HALVES, PARTNERS == 1 ? 0 : MERGED) / 4;
  constexpr int SUMS = SIMD_GROUPS * FRAGMENTS * tile_tokens(DIMS, sizeof(T), HALVES) * 2;
  constexpr int SCRATCH = TILE + (HALVES == 1 ? 0 : SUMS);
  threadgroup float4 scratch[SCRATCH];
  tiled_attention<
      KEY_DIM, VALUE_DIM, FRAGMENTS, SIMD_GROUPS, PARTNERS, HALVES, SPLIT, SINKS, LOG_SUMS>(
      ARGUMENTS, reinterpret_cast<threadgroup float*>(scratch),
      reinterpret_cast<threadgroup float2*>(scratch + TILE),
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      threadgroup_position_in_grid.z, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


class Asked(NamedTuple):
    """All that decides how an attention is launched."""

    rows: tuple[int, int]  # T and query heads
    kv_heads: int
    dims: tuple[int, int]  # D and V
    dtype: mx.Dtype
    formats: tuple[KVFormat, KVFormat]  # of keys and values
    shared_tails: bool  # of keys and values, side by side
    sinks: bool
    log_sums: bool
    num_seqs: int
    num_items: int
    max_queries: int
    is_split: bool
    is_prefill: bool = False  # tiles of prompts
    # Numbers of the stored vectors that hold keys and values both; 0: each has vectors of its own.
    joint_dim: int = 0

    @property
    def num_rows(self) -> int:
        """Query rows of a KV head."""
        return self.max_queries * (self.rows[1] // self.kv_heads)


def paged_attention_on_metal(
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
    """Attention of 1 to 8 queries of each sequence over its pages and its tail.

    Args:
        queries: (T, H * G, D), those of the plan's first sequence first.
        keys: plain, or codes of 8 or 4 bits with scales and biases.
        values: likewise; another format than the keys' is fine.
        plan: of the step and the layer's group.
        scale: multiplies the scores.
        sink_logits: (H * G,) logits that join each softmax without a value.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        value_dim: V where it differs from D.
        log_sums: return the second array too.

    Returns:
        outputs (T, H * G, V) in the queries' dtype; and the logarithm of each softmax's
        denominator, sink logits included, (T, H * G) float32.

    Raises:
        ValueError: no kernel has these sizes; `paged_attention_gathered` takes any.
    """
    attention = paged_attention(
        queries,
        keys,
        values,
        plan,
        scale=scale,
        sinks=sink_logits is not None,
        soft_cap=soft_cap,
        value_dim=value_dim,
        log_sums=log_sums,
    )
    outputs, *sums = attention(queries, arrays_of(keys, values), sink_logits)
    return [outputs.reshape(*queries.shape[:2], -1), *sums]


def arrays_of(keys: Stored, values: Stored) -> list[mx.array]:
    """The arrays of a layer in the order in which the kernels take them."""
    own_tails = [] if values.tail_head or keys.first else values.tails
    own_pages = [] if keys.first else values.pages
    return [*keys.tails, *keys.pages, *own_tails, *own_pages]


def paged_attention(
    queries: mx.array,
    keys: Stored,
    values: Stored,
    plan: AttentionPlan,
    *,
    scale: float,
    sinks: bool,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    log_sums: bool = False,
) -> Attention:
    """The attention for arrays of these sizes; arguments as of `paged_attention_on_metal`.

    Args:
        sinks: there are sink logits.
    """
    num_tokens, num_heads, key_dim = queries.shape
    value_dim = value_dim or key_dim
    assert num_tokens == plan.num_queries, (queries.shape, plan.num_queries)
    kv_heads = keys.pages[0].shape[0]
    tails = keys.tail_head, keys.tail_heads, values.tail_head
    assert tails in {(0, kv_heads, 0), (0, 2 * kv_heads, kv_heads)}, tails
    joint_dim = keys.vector_dim if keys.first else 0
    assert values.first == 0
    assert joint_dim in (0, keys.first + key_dim)
    asked = Asked(
        rows=(num_tokens, num_heads),
        kv_heads=kv_heads,
        dims=(key_dim, value_dim),
        dtype=queries.dtype,
        formats=(keys.fmt, values.fmt),
        shared_tails=values.tail_head > 0,
        sinks=sinks,
        log_sums=log_sums,
        num_seqs=plan.num_seqs,
        num_items=plan.num_items,
        max_queries=plan.max_queries,
        is_split=plan.is_split,
        is_prefill=plan.is_prefill,
        joint_dim=joint_dim,
    )
    return Attention(*_passes(asked), [plan.numbers, plan.pages, _numbers(scale, soft_cap or 0.0)])


@cache
def _numbers(scale: float, soft_cap: float) -> mx.array:
    """The same for every step of a layer."""
    return mx.array([scale, soft_cap], mx.float32)


@lru_cache(MAX_PASSES)
def _passes(asked: Asked) -> tuple[Launch, Launch | None]:
    """The launches, the same for every layer and step that asks for the same.

    Raises:
        ValueError: no kernel has these sizes.
    """
    check_sizes(asked.dtype, asked.dims, asked.num_rows, joint_dim=asked.joint_dim)
    attend = _attend(asked)
    if not asked.is_split:
        return attend, None
    num_places = asked.num_seqs * asked.max_queries
    how = {"sinks": asked.sinks, "log_sums": asked.log_sums}
    return attend, reduction(asked.rows, num_places, asked.dims[1], asked.dtype, **how)


def _attend(asked: Asked) -> Launch:
    """The first pass."""
    (key_dim, value_dim), (key_format, value_format) = asked.dims, asked.formats
    log_sums = asked.log_sums and not asked.is_split
    shape = _shape(asked)
    figures = asked.is_split or log_sums
    how = {"shared_tails": asked.shared_tails, "joint": asked.joint_dim > 0}
    if asked.is_split:
        sizes = partial_sizes(asked.num_items, asked.kv_heads, asked.num_rows, value_dim)
    else:
        sizes = output_sizes(asked.rows, value_dim, asked.dtype, log_sums=log_sums)
    return Launch(
        attention_kernel(shape.shares, asked.formats, **how, sinks=asked.sinks, figures=figures),
        template=[
            ("T", asked.dtype),
            ("KEY_BITS", key_format.bits),
            ("VALUE_BITS", value_format.bits),
            ("KEY_DIM", key_dim),
            ("VALUE_DIM", value_dim),
            ("KEY_VECTOR", asked.joint_dim or key_dim),
            ("KEY_FIRST", asked.joint_dim - key_dim if asked.joint_dim else 0),
            ("VALUE_VECTOR", asked.joint_dim or value_dim),
            ("VALUE_FIRST", 0),
            ("SPLIT", asked.is_split),
            ("SINKS", asked.sinks),
            ("LOG_SUMS", log_sums),
            *_shape_template(shape),
        ],
        grid=(asked.num_items * shape.threads, asked.kv_heads, -(-asked.num_rows // shape.rows)),
        threadgroup=(shape.threads, 1, 1),
        **sizes,
    )


def _shape(asked: Asked) -> Shape:
    key_dim, value_dim = asked.dims
    if not asked.is_prefill:
        return threadgroup_shape(
            asked.num_rows, key_dim=key_dim, value_dim=value_dim, itemsize=asked.dtype.size
        )
    shape = prefill_shape(key_dim=key_dim, value_dim=value_dim)
    assert asked.num_rows <= shape.rows, (asked, shape)
    return shape


def has_dims(dtype: mx.Dtype, dims: tuple[int, int], joint_dim: int = 0) -> bool:
    """Whether there is a kernel for keys and values of these dims.

    Args:
        joint_dim: of the vectors that hold both, keys at the end; 0: each has vectors of its own.
    """
    if dtype not in DTYPES or joint_dim % 64:
        return False
    return set(dims) <= set(HEAD_DIMS) or (dims == (LARGE_DIM, LARGE_DIM) and dtype.size == 2)


def check_sizes(
    dtype: mx.Dtype, dims: tuple[int, int], num_rows: int, *, joint_dim: int = 0
) -> None:
    """Raise ValueError where no kernel fits."""
    if dtype not in DTYPES:
        raise ValueError(f"queries are {dtype}; the kernels take floats of 16 or 32 bits")
    if not has_dims(dtype, dims, joint_dim):
        raise ValueError(
            f"head dims {dims}, {joint_dim} in one vector; the kernels have {HEAD_DIMS} and, in "
            f"16 bits, {LARGE_DIM}, and vectors of multiples of 64 numbers for both"
        )
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} query rows of a KV head; the kernels take up to {MAX_ROWS}")


def _shape_template(shape: Shape) -> list[tuple[str, TemplateValue]]:
    found: list[tuple[str, TemplateValue]] = [("FRAGMENTS", shape.fragments)]
    if shape.shares:
        found += [
            ("SIMD_GROUPS", shape.simd_groups),
            ("PARTNERS", shape.partners),
            ("HALVES", shape.halves),
        ]
    return found


@cache
def attention_kernel(
    shares: bool,
    formats: tuple[KVFormat, KVFormat],
    *,
    shared_tails: bool,
    joint: bool,
    sinks: bool,
    figures: bool,
) -> MetalKernel:
    """The kernel that shares tiles, or the one that streams, with the arrays that it needs.

    Each array costs something in every layer.

    Args:
        shares: tiles are shared.
        formats: of keys and values.
        shared_tails: of keys and values, side by side.
        joint: keys and values are numbers of the same vectors.
        sinks: there are sink logits.
        figures: beside the outputs.
    """
    keys, values = formats
    value_tails = "tail" if shared_tails or joint else "value_tail"
    value_pages = "key" if joint else "value"
    tail_heads = ("2 * " if shared_tails else "") + "key_codes_shape[0]"
    arguments = f"""
      queries,
      plane_of<KEY_BITS, KEY_VECTOR, KEY_FIRST>({plane_text("tail", "key", keys)}),
      plane_of<VALUE_BITS, VALUE_VECTOR, VALUE_FIRST>(
          {plane_text(value_tails, value_pages, values)}),
      {"sink_logits" if sinks else "queries"}, StepPlan{{plan}}, pages, numbers,
      queries_shape[1], key_codes_shape[0], {tail_heads}, key_codes_shape[1],
      outputs, {"figures" if figures else NO_FIGURES}"""
    return MetalKernel(
        name="tiled_attention" if shares else "paged_attention",
        inputs=(
            "queries",
            *part_names("tail", keys),
            *part_names("key", keys),
            *([] if value_tails == "tail" else part_names(value_tails, values)),
            *([] if joint else part_names(value_pages, values)),
            *("plan", "pages", "numbers"),
            *sink_names(sinks=sinks),
        ),
        outputs=("outputs", "figures") if figures else ("outputs",),
        includes=includes(formats),
        body=(TILED if shares else STREAMED).replace("ARGUMENTS", arguments),
    )
