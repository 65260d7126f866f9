"""The second pass of attention kernels: partials of several items become outputs.

T = query tokens of all sequences, R = query rows of a sequence and KV head, V = value dim.
"""

from collections.abc import Sequence

import mlx.core as mx

from .attention_plan import AttentionPlan
from .attention_shape import LANES
from .launch import MetalKernel

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


def result_sizes(
    queries: mx.array, plan: AttentionPlan, heads: int, dim: int
) -> tuple[list[tuple[int, ...]], list[mx.Dtype]]:
    """Shapes and dtypes of what the first pass puts down.

    Partials (items, H, R, V) and their peaks and totals (items, H, R, 2), float32; or outputs
    (T, heads, V) and log-sum-exps (T, heads) where no sequence is split.
    """
    num_tokens, num_heads, _ = queries.shape
    if plan.is_split:
        rows = (plan.num_items, heads, plan.max_queries * num_heads // heads)
        return [(*rows, dim), (*rows, 2)], [mx.float32, mx.float32]
    return [(num_tokens, num_heads, dim), (num_tokens, num_heads)], [queries.dtype, mx.float32]


def finished(
    results: Sequence[mx.array],
    queries: mx.array,
    plan: AttentionPlan,
    sink_logits: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Outputs (T, heads, V) and log-sum-exps (T, heads) from what the first pass put down."""
    if plan.is_split:
        num_tokens, num_heads, _ = queries.shape
        dim = results[0].shape[-1]
        results = _reduce(
            [*results, queries if sink_logits is None else sink_logits, plan.spans, plan.sizes],
            template=[("DIM", dim), ("SINKS", sink_logits is not None)],
            grid=(LANES, num_heads, plan.num_seqs * plan.max_queries),
            threadgroup=(LANES, min(num_heads, HEADS), 1),
            output_shapes=[(num_tokens, num_heads, dim), (num_tokens, num_heads)],
            output_dtypes=[queries.dtype, mx.float32],
        )
    outputs, log_sum_exps = results
    return outputs, log_sum_exps
