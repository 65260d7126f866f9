"""The second pass of attention kernels: partials of several items become outputs.

T = query tokens of all sequences, R = query rows of a sequence and KV head, V = value dim.
"""

from typing import TypedDict

import mlx.core as mx

from .attention_plan import AttentionPlan
from .attention_shape import LANES
from .launch import Launch, MetalKernel

INCLUDES = ("attention_fragments.h", "attention_softmax.h", "paged_spans.h", "attention_outputs.h")
HEADS = 4  # query heads of a threadgroup

_reduce = MetalKernel(
    name="attention_reduce",
    inputs=("partials", "figures", "sink_logits", "spans", "sizes"),
    outputs=("outputs", "log_sum_exp"),
    includes=INCLUDES,
    body="""
  attention_reduce<DIM, SINKS>(
      partials, figures, sink_logits, spans, sizes, partials_shape[1], outputs, log_sum_exp,
      thread_position_in_grid.y, thread_position_in_grid.z, thread_index_in_simdgroup,
      threads_per_grid.y);
""",
)


class Sizes(TypedDict):
    """What a launch puts down."""

    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]


def result_sizes(queries: mx.array, plan: AttentionPlan, heads: int, dim: int) -> Sizes:
    """What the first pass puts down.

    Partials (items, H, R, V) and their peaks and totals (items, H, R, 2), float32; or outputs
    (T, heads, V) and log-sum-exps (T, heads) where no sequence is split.
    """
    if not plan.is_split:
        return _outputs(queries, dim)
    rows = (plan.num_items, heads, plan.max_queries * queries.shape[1] // heads)
    return Sizes(output_shapes=[(*rows, dim), (*rows, 2)], output_dtypes=[mx.float32, mx.float32])


def reduction(queries: mx.array, plan: AttentionPlan, dim: int, *, sinks: bool) -> Launch | None:
    """The second pass, of what `result_sizes` says; None where no sequence is split.

    Its inputs are partials, peaks and totals, sink logits or what is not read, spans and sizes.
    """
    if not plan.is_split:
        return None
    num_heads = queries.shape[1]
    return Launch(
        _reduce,
        template=[("T", queries.dtype), ("DIM", dim), ("SINKS", sinks)],
        grid=(LANES, num_heads, plan.num_seqs * plan.max_queries),
        threadgroup=(LANES, min(num_heads, HEADS), 1),
        **_outputs(queries, dim),
    )


def _outputs(queries: mx.array, dim: int) -> Sizes:
    """Outputs (T, heads, V) and log-sum-exps (T, heads)."""
    num_tokens, num_heads, _ = queries.shape
    return Sizes(
        output_shapes=[(num_tokens, num_heads, dim), (num_tokens, num_heads)],
        output_dtypes=[queries.dtype, mx.float32],
    )
