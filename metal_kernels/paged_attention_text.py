"""What MLX compiles for paged attention: bodies around the kernels, and the arrays that they take.

Knows no sizes; those are values of a launch.
"""

from functools import cache
from typing import NamedTuple

from .attention_reduce import NO_FIGURES, includes, sink_names
from .launch import MetalKernel
from .stored import part_names, plane_text

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
