"""How paged attention is compiled and launched: sizes, variants, one pass or two. Knows no arrays.

T = query tokens of all sequences, D = key dim, V = value dim.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

from .attention_reduce import (
    NO_FIGURES,
    includes,
    output_sizes,
    partial_sizes,
    reduction,
    sink_names,
)
from .attention_shape import Shape, prefill_shape, threadgroup_shape
from .launch import Launch, MetalKernel, TemplateValue
from .stored import part_names, plane_text

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
    bits: tuple[int, int]  # of keys and values; 0: plain
    shared_tails: bool
    sinks: bool
    log_sums: bool
    num_seqs: int
    num_items: int
    max_queries: int
    is_split: bool
    is_prefill: bool = False  # tiles of prompts
    # Numbers of the stored vectors that hold keys and values both; 0: each has vectors of its own.
    joint_dim: int = 0


class Passes(NamedTuple):
    """The launches of one attention."""

    attend: Launch
    reduce: Launch | None  # where a sequence is split


@lru_cache(MAX_PASSES)
def passes_of(asked: Asked) -> Passes:
    """The launches, the same for every layer and step that asks for the same.

    Raises:
        ValueError: no kernel has these sizes.
    """
    num_rows = asked.max_queries * (asked.rows[1] // asked.kv_heads)
    check_sizes(asked.dtype, asked.dims, num_rows, joint_dim=asked.joint_dim)
    attend = _attend(asked, num_rows)
    if not asked.is_split:
        return Passes(attend, None)
    reduce = reduction(
        asked.rows,
        asked.num_seqs * asked.max_queries,
        asked.dims[1],
        asked.dtype,
        sinks=asked.sinks,
        log_sums=asked.log_sums,
    )
    return Passes(attend, reduce)


def _attend(asked: Asked, num_rows: int) -> Launch:
    """The first pass; `num_rows` query rows of a KV head."""
    (key_dim, value_dim), (key_bits, value_bits) = asked.dims, asked.bits
    log_sums = asked.log_sums and not asked.is_split
    shape = _shape(asked, num_rows)
    traits = Traits(
        plain_keys=key_bits == 0,
        plain_values=value_bits == 0,
        shared_tails=asked.shared_tails,
        joint=asked.joint_dim > 0,
        sinks=asked.sinks,
        figures=asked.is_split or log_sums,
    )
    if asked.is_split:
        sizes = partial_sizes(asked.num_items, asked.kv_heads, num_rows, value_dim)
    else:
        sizes = output_sizes(asked.rows, value_dim, asked.dtype, log_sums=log_sums)
    return Launch(
        attention_kernel(shape.shares, traits),
        template=[
            ("T", asked.dtype),
            ("KEY_BITS", key_bits),
            ("VALUE_BITS", value_bits),
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
        grid=(asked.num_items * shape.threads, asked.kv_heads, -(-num_rows // shape.rows)),
        threadgroup=(shape.threads, 1, 1),
        **sizes,
    )


def _shape(asked: Asked, num_rows: int) -> Shape:
    key_dim, value_dim = asked.dims
    if not asked.is_prefill:
        return threadgroup_shape(
            num_rows, key_dim=key_dim, value_dim=value_dim, itemsize=asked.dtype.size
        )
    shape = prefill_shape(key_dim=key_dim, value_dim=value_dim)
    assert num_rows <= shape.rows, (num_rows, shape)
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


class Traits(NamedTuple):
    """What decides which arrays a kernel has: each of them costs something in every layer."""

    plain_keys: bool
    plain_values: bool
    shared_tails: bool  # of keys and values, side by side
    joint: bool  # keys and values are numbers of the same vectors
    sinks: bool
    figures: bool  # beside the outputs


@cache
def attention_kernel(shares: bool, traits: Traits) -> MetalKernel:
    """The one that shares tiles, or the one that streams, with arrays for these traits."""
    value_tails = "tail" if traits.shared_tails or traits.joint else "value_tail"
    value_pages = "key" if traits.joint else "value"
    tail_heads = ("2 * " if traits.shared_tails else "") + "key_codes_shape[0]"
    arguments = f"""
      queries,
      plane_of<KEY_BITS, KEY_VECTOR, KEY_FIRST>(
          {plane_text("tail", "key", plain=traits.plain_keys)}),
      plane_of<VALUE_BITS, VALUE_VECTOR, VALUE_FIRST>(
          {plane_text(value_tails, value_pages, plain=traits.plain_values)}),
      {"sink_logits" if traits.sinks else "queries"}, StepPlan{{plan}}, pages, numbers,
      queries_shape[1], key_codes_shape[0], {tail_heads}, key_codes_shape[1],
      outputs, {"figures" if traits.figures else NO_FIGURES}"""
    return MetalKernel(
        name="tiled_attention" if shares else "paged_attention",
        inputs=(
            "queries",
            *part_names("tail", plain=traits.plain_keys),
            *part_names("key", plain=traits.plain_keys),
            *([] if value_tails == "tail" else part_names(value_tails, plain=traits.plain_values)),
            *([] if traits.joint else part_names(value_pages, plain=traits.plain_values)),
            *("plan", "pages", "numbers"),
            *sink_names(sinks=traits.sinks),
        ),
        outputs=("outputs", "figures") if traits.figures else ("outputs",),
        includes=includes(plain=traits.plain_keys and traits.plain_values),
        body=(TILED if shares else STREAMED).replace("ARGUMENTS", arguments),
    )
