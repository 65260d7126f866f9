"""Paged attention through Metal kernels: sizes, variants, one pass or two. Knows arrays; no step.

T = query tokens of all sequences, H = KV heads, G = query heads per KV head, D = key dim,
V = value dim.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

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
from .stored import KVFormat, Stored, part_names, plane_text

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
