"""Attention of sequences' query tokens over their pages and tails. Knows no scheduler.

`paged_attention_on_metal` launches the kernels, in one pass or two: partials of several items of a
sequence become outputs in the second. `paged_attention_gathered` is the simple twin of the kernels
in plain MLX and float32: tests and the check on a new GPU compare the kernels with it.
`attend_in_tiles` is for prompts over keys and values that are made block by block.

B = sequences, Q = query tokens each, T = query tokens of all sequences, H = KV heads,
G = query heads per KV head, D = key dim, V = value dim, N = tokens of gathered pages,
R = tail length (a ring of two pages).
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .attention_plan import LANES, WHOLE_DIM, AttentionPlan, Shape, prefill_shape, threadgroup_shape
from .launch import Launch, MetalKernel, TemplateValue
from .stored import KVFormat, Plane, part_names, plane_text


class Softmax(NamedTuple):
    """How a layer makes weights of queries times keys, the scores of its attention."""

    scale: float  # multiplies the scores
    sinks: mx.array | None = None  # (heads,) logits that join each softmax without a value
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)


HIDDEN = float(np.finfo(np.float32).min)  # additive mask of what must not be seen


def paged_attention_gathered(
    queries: mx.array,
    keys: Plane,
    values: Plane,
    plan: AttentionPlan,
    softmax: Softmax,
    *,
    value_dim: int | None = None,
    log_sums: bool = False,
) -> list[mx.array]:
    """The same as `paged_attention_on_metal`."""
    value_dim = value_dim or queries.shape[-1]
    page_size, window, sinks, *_ = plan.sizes.tolist()
    attended = []
    tables = np.array(plan.pages)
    for span, place in zip(plan.spans, plan.tables, strict=True):
        table = tables[place]
        row, start, stop, sealed, slot, *_ = (int(field) for field in span)
        row_queries = queries[row : row + stop - start].astype(mx.float32)  # (Q, H * G, D)
        query_positions = np.arange(start, stop, dtype=np.int32)[:, None]
        positions = held_positions(table, stop, sealed, page_size)
        visible = _sees(query_positions, positions[None], window, sinks)
        positions, visible = positions[visible.any(axis=0)], visible[:, visible.any(axis=0)]
        index = token_index(table, positions, sealed, page_size)
        attended.append(
            attend(
                row_queries,
                gathered(keys, page_size, slot, index),
                gathered(values, page_size, slot, index),
                mx.array(np.where(visible, 0.0, HIDDEN).astype(np.float32)),
                softmax,
            )
        )
    attended = [attended[i] for i in np.argsort(plan.spans[:, 0])]  # by their rows
    outputs = mx.concatenate([outputs for outputs, _ in attended]).astype(queries.dtype)
    return [outputs, mx.concatenate([sums for _, sums in attended])] if log_sums else [outputs]


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


def gathered(plane: Plane, page_size: int, slot: int, index: tuple[mx.array, mx.array]) -> mx.array:
    """(H, tokens, dim) float32: of the pages, then of the tail."""
    tokens, ring = index
    parts = [
        mx.concatenate([pages[:, tokens], tails[slot][:, ring]], axis=1)
        for pages, tails in zip(plane.pages, plane.own_tails(page_size), strict=True)
    ]
    return plane.decode(parts, mx.float32)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, softmax: Softmax
) -> tuple[mx.array, mx.array]:
    """Outputs (Q, H * G, V) and log-sum-exps (Q, H * G) of one sequence.

    Args:
        queries: (Q, H * G, D).
        keys, values: (H, N, D) and (H, N, V).
        mask: (Q, N) additive.
    """
    (scale, sinks, soft_cap), num_heads = softmax, queries.shape[1]
    repeats = num_heads // len(keys)
    keys, values = mx.repeat(keys, repeats, axis=0), mx.repeat(values, repeats, axis=0)
    scores = (queries.swapaxes(0, 1) @ keys.swapaxes(1, 2)) * scale  # (H * G, Q, N)
    if soft_cap is not None:
        scores = soft_cap * mx.tanh(scores / soft_cap)
    scores = scores + mask
    log_sum_exp = mx.logsumexp(scores, axis=-1, keepdims=True)  # (H * G, Q, 1)
    if sinks is not None:
        column = sinks.astype(mx.float32).reshape(num_heads, 1, 1)
        log_sum_exp = mx.logaddexp(log_sum_exp, column)
    outputs = mx.exp(scores - log_sum_exp) @ values  # (H * G, Q, V)
    return outputs.swapaxes(0, 1), log_sum_exp.squeeze(-1).T


def _sees(
    queries: NDArray[np.int32], keys: NDArray[np.int32], window: int, sinks: int
) -> NDArray[np.bool_]:
    return (keys <= queries) & ((keys > queries - window) | (keys < sinks))


NO_FIGURES = "static_cast<device float*>(nullptr)"  # in a body; never written
REDUCERS = 8  # SIMD groups that share the items of a query head
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
  paged_attention<KEY_DIM, VALUE_DIM, FRAGMENTS, SPLIT, SINKS, LOG_SUMS, PAIRS>(ARGUMENTS,
      reinterpret_cast<threadgroup T*>(shared_queries), shared_figures, slices,
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
TILED = """
  constexpr int MERGED = SIMD_GROUPS * 8 * (FRAGMENTS * 2 + slice_pitch(VALUE_DIM));
  constexpr int DIMS = HALVES == 1 ? KEY_DIM + VALUE_DIM : KEY_DIM;
  constexpr int TILE =
      scratch_floats(DIMS, sizeof(NUMBER), HALVES, PARTNERS == 1 ? 0 : MERGED) / 4;
  constexpr int SUMS = SIMD_GROUPS * FRAGMENTS * tile_tokens(DIMS, sizeof(NUMBER), HALVES) * 2;
  constexpr int SCRATCH = TILE + (HALVES == 1 ? 0 : SUMS);
  threadgroup float4 scratch[SCRATCH];
  tiled_attention<
      NUMBER, KEY_DIM, VALUE_DIM, FRAGMENTS, SIMD_GROUPS, PARTNERS, HALVES, SPLIT, SINKS, LOG_SUMS>(
      ARGUMENTS, reinterpret_cast<threadgroup float*>(scratch),
      reinterpret_cast<threadgroup float2*>(scratch + TILE),
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      threadgroup_position_in_grid.z, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""


Sizes = dict[str, Any]
"""The shapes and dtypes of what a launch puts down, as arguments of `Launch`."""


def includes(formats: Sequence[KVFormat] = ()) -> tuple[str, ...]:
    """The files that attention kernels have in common, for vectors stored in these formats."""
    return (
        "attention_fragments.h",
        *(("stored_codes.h",) if any(fmt.bits for fmt in formats) else ()),
        "attention_softmax.h", "paged_spans.h", "attention_outputs.h",
    )  # fmt: skip


class Asked(NamedTuple):
    """All that decides how an attention is launched."""

    rows: tuple[int, int]  # T and query heads
    kv_heads: int
    dims: tuple[int, int]  # D and V
    dtype: mx.Dtype
    formats: tuple[KVFormat, KVFormat]  # of keys and values
    sinks: bool
    log_sums: bool
    num_spans: int
    num_items: int
    max_queries: int
    is_prefill: bool = False  # tiles of prompts
    shared_tails: bool = False  # of keys and values, side by side
    # Numbers of the stored vectors that hold keys and values both; 0: each has vectors of its own.
    joint_dim: int = 0
    pairs: bool = False  # outputs are kept as pairs of numbers, no matrices; not in tiles

    @property
    def num_rows(self) -> int:
        return self.max_queries * (self.rows[1] // self.kv_heads)

    @property
    def tile_dtype(self) -> mx.Dtype:
        """Of numbers in tiles.

        Rows to verify see dequantised numbers as they are, as rows that stream do: rounded ones
        would turn near-ties, so that answers with proposals differ from those without. All rows of
        large dims are in tiles.
        """
        streams = not self.is_prefill and max(self.dims) <= WHOLE_DIM
        return mx.float32 if streams and any(fmt.bits for fmt in self.formats) else self.dtype

    @property
    def is_split(self) -> bool:
        """Whether a span has several items, so that partials must be reduced."""
        return self.num_items > self.num_spans


def paged_attention_on_metal(
    queries: mx.array,
    keys: Plane,
    values: Plane,
    plan: AttentionPlan,
    softmax: Softmax,
    *,
    value_dim: int | None = None,
    log_sums: bool = False,
    pairs: bool = False,
) -> list[mx.array]:
    """Attention of 1 to 8 queries of each sequence over its pages and its tail; see `has_dims`.

    Args:
        queries: (T, H * G, D), those of the plan's first sequence first.
        keys: plain, or codes of 8 or 4 bits with scales and biases.
        values: likewise; another format than the keys' is fine.
        value_dim: V where it differs from D.
        pairs: see `has_pairs`.

    Returns:
        outputs (T, H * G, V) in the queries' dtype; and the logarithm of each softmax's
        denominator, sink logits included, (T, H * G) float32.
    """
    attention = paged_attention(
        queries, keys, values, plan, softmax, value_dim=value_dim, log_sums=log_sums, pairs=pairs
    )
    outputs, *sums = attention(queries, arrays_of(keys, values), softmax.sinks)
    return [outputs.reshape(*queries.shape[:2], -1), *sums]


AttentionCall = Callable[..., list[mx.array]]
"""`call(queries, arrays, sink_logits=None)`: one attention, the same for all layers of a step with
the same sizes. Queries are (T, heads, D), arrays are `arrays_of` the layer's keys and values, and
sink logits (heads,), where it was made for such. It gives outputs (T, heads * V), and log-sum-exps
(T, heads) float32 where they are asked for."""


def attention_call(
    passes: tuple[Launch, Launch | None], plan: AttentionPlan, numbers: mx.array
) -> AttentionCall:
    """The attention of launches; the second is None unless a sequence is split."""
    (first, second), shared = passes, [plan.numbers, plan.pages, numbers]

    def call(
        queries: mx.array, arrays: Sequence[mx.array], sink_logits: mx.array | None = None
    ) -> list[mx.array]:
        logits = [] if sink_logits is None else [sink_logits]
        results = first([queries, *arrays, *shared, *logits])
        return results if second is None else second([*results, plan.numbers, *logits])

    return call


def arrays_of(keys: Plane, values: Plane) -> list[mx.array]:
    own_tails = [] if values.tail_head or keys.first else values.tails
    own_pages = [] if keys.first else values.pages
    return [*keys.tails, *keys.pages, *own_tails, *own_pages]


def paged_attention(
    queries: mx.array,
    keys: Plane,
    values: Plane,
    plan: AttentionPlan,
    softmax: Softmax,
    *,
    value_dim: int | None = None,
    log_sums: bool = False,
    pairs: bool = False,
) -> AttentionCall:
    """The kernel for arrays of these sizes; same arguments as `paged_attention_on_metal`."""
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
        sinks=softmax.sinks is not None,
        log_sums=log_sums,
        num_spans=plan.num_spans,
        num_items=plan.num_items,
        max_queries=plan.max_queries,
        is_prefill=plan.is_prefill,
        shared_tails=values.tail_head > 0,
        joint_dim=joint_dim,
        pairs=pairs,
    )
    numbers = _numbers(softmax.scale, softmax.soft_cap or 0.0)
    return attention_call(passes(asked, _attend), plan, numbers)


@cache
def _numbers(scale: float, soft_cap: float) -> mx.array:
    return mx.array([scale, soft_cap], mx.float32)


@lru_cache(MAX_PASSES)
def passes(asked: Asked, attend: Callable[[Asked, Sizes], Launch]) -> tuple[Launch, Launch | None]:
    """The launches, the same for every layer and step that asks for the same.

    Args:
        attend: makes the first pass, which puts down arrays of these sizes.
    """
    dim = asked.dims[1]
    if not asked.is_split:
        return attend(asked, output_sizes(asked)), None
    rows = (asked.num_items, asked.kv_heads, asked.num_rows)
    shapes = [(*rows, dim), (*rows, 2)]  # partials, peaks and totals
    partials = Sizes(output_shapes=shapes, output_dtypes=[mx.float32, mx.float32])
    return attend(asked, partials), _reduction(asked)


def _attend(asked: Asked, sizes: Sizes) -> Launch:
    assert has_dims(asked.dtype, asked.dims, asked.joint_dim), asked
    assert asked.num_rows <= MAX_ROWS, asked
    (key_dim, value_dim), (key_format, value_format) = asked.dims, asked.formats
    shape = _shape(asked)
    return Launch(
        attention_kernel(asked, shares=shape.shares),
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
            ("LOG_SUMS", asked.log_sums and not asked.is_split),
            *_shape_template(shape, asked),
        ],
        grid=(asked.num_items * shape.threads, asked.kv_heads, -(-asked.num_rows // shape.rows)),
        threadgroup=(shape.threads, 1, 1),
        **sizes,
    )


def _shape(asked: Asked) -> Shape:
    key_dim, value_dim = asked.dims
    if not asked.is_prefill:
        return threadgroup_shape(
            asked.num_rows, key_dim=key_dim, value_dim=value_dim, itemsize=asked.tile_dtype.size
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


def _shape_template(shape: Shape, asked: Asked) -> list[tuple[str, TemplateValue]]:
    if not shape.shares:
        return [("FRAGMENTS", shape.fragments), ("PAIRS", asked.pairs)]
    assert not asked.pairs, asked
    return [
        ("FRAGMENTS", shape.fragments),
        ("NUMBER", asked.tile_dtype),
        ("SIMD_GROUPS", shape.simd_groups),
        ("PARTNERS", shape.partners),
        ("HALVES", shape.halves),
    ]


def attention_kernel(asked: Asked, *, shares: bool) -> MetalKernel:
    """The kernel that shares tiles, or the one that streams, with the arrays that it needs."""
    return _kernel(
        shares,
        asked.formats,
        tails="tail" if asked.shared_tails or asked.joint_dim else "value_tail",
        pages="key" if asked.joint_dim else "value",
        tail_heads="2 * key_codes_shape[0]" if asked.shared_tails else "key_codes_shape[0]",
        sinks=asked.sinks,
        figures=asked.is_split or asked.log_sums,
    )


@cache
def _kernel(
    shares: bool,
    formats: tuple[KVFormat, KVFormat],
    *,
    tails: str,
    pages: str,
    tail_heads: str,
    sinks: bool,
    figures: bool,
) -> MetalKernel:
    """Each array costs something in every layer: `tails` and `pages` name those of values."""
    keys, values = formats
    arguments = f"""
      queries,
      plane_of<KEY_BITS, KEY_VECTOR, KEY_FIRST>({plane_text("tail", "key", keys)}),
      plane_of<VALUE_BITS, VALUE_VECTOR, VALUE_FIRST>(
          {plane_text(tails, pages, values)}),
      {"sink_logits" if sinks else "queries"}, StepPlan{{plan}}, pages, numbers,
      queries_shape[1], key_codes_shape[0], {tail_heads}, key_codes_shape[1],
      outputs, {"figures" if figures else NO_FIGURES}"""
    arrays = [("tail", keys), ("key", keys), (tails, values), (pages, values)]
    names = dict.fromkeys(name for kind, fmt in arrays for name in part_names(kind, fmt))
    return MetalKernel(
        name="tiled_attention" if shares else "paged_attention",
        inputs=("queries", *names, "plan", "pages", "numbers", *sink_names(sinks=sinks)),
        outputs=("outputs", "figures") if figures else ("outputs",),
        includes=includes(formats),
        body=(TILED if shares else STREAMED).replace("ARGUMENTS", arguments),
    )


# -- the second pass ------------------------------------------------------------------------------


def output_sizes(asked: Asked) -> Sizes:
    """Of the last pass: outputs (T, heads * V), and log-sum-exps (T, heads) where asked for."""
    outputs = asked.rows[0], asked.rows[1] * asked.dims[1]
    if asked.log_sums:
        shapes, dtypes = [outputs, asked.rows], [asked.dtype, mx.float32]
        return Sizes(output_shapes=shapes, output_dtypes=dtypes)
    return Sizes(output_shapes=[outputs], output_dtypes=[asked.dtype])


def _reduction(asked: Asked) -> Launch:
    """From partials, peaks and totals, and a plan's numbers to `output_sizes`.

    Sink logits, where there are any, are its last input.
    """
    return Launch(
        _reduce_kernel(asked.sinks, asked.log_sums),
        template=[
            ("T", asked.dtype),
            ("DIM", asked.dims[1]),
            ("SINKS", asked.sinks),
            ("LOG_SUMS", asked.log_sums),
        ],
        grid=(LANES * REDUCERS, asked.rows[1], asked.num_spans * asked.max_queries),
        threadgroup=(LANES * REDUCERS, 1, 1),
        **output_sizes(asked),
    )


@cache
def _reduce_kernel(sinks: bool, log_sums: bool) -> MetalKernel:
    return MetalKernel(
        name="attention_reduce",
        inputs=("partials", "figures", "plan", *sink_names(sinks=sinks)),
        outputs=("outputs", "log_sum_exp") if log_sums else ("outputs",),
        includes=includes(),
        body=f"""
  threadgroup float found[REDUCERS];
  threadgroup float slices[REDUCERS * ROUND_CHUNKS * 32];
  const ReduceScratch scratch = {{found, slices}};
  attention_reduce<DIM, SINKS, LOG_SUMS>(
      partials, figures, {"sink_logits" if sinks else "partials"}, StepPlan{{plan}},
      partials_shape[1], outputs, {"log_sum_exp" if log_sums else NO_FIGURES},
      scratch, threadgroup_position_in_grid.y, threadgroup_position_in_grid.z,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup, threadgroups_per_grid.y);
""",
    )


def sink_names(*, sinks: bool) -> tuple[str, ...]:
    return ("sink_logits",) if sinks else ()
