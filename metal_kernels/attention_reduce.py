"""What attention kernels put down, and the second pass: partials of several items become outputs.

T = query tokens of all sequences, H = KV heads, R = query rows of a sequence and KV head,
V = value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from .attention_shape import LANES
from .launch import Launch, MetalKernel
from .stored import KVFormat

NO_FIGURES = "static_cast<device float*>(nullptr)"  # in a body; never written
REDUCERS = 8  # SIMD groups that share the items of a query head


def includes(formats: Sequence[KVFormat] = ()) -> tuple[str, ...]:
    """The files that attention kernels have in common, for vectors stored in these formats."""
    return (
        "attention_fragments.h",
        *(("stored_codes.h",) if any(fmt.bits for fmt in formats) else ()),
        *("attention_softmax.h", "paged_spans.h", "attention_outputs.h"),
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention, the same for all layers of a step with the same sizes.

    Attributes:
        attend, reduce: its launches; `reduce` is None unless a sequence is split.
        shared: inputs that do not differ between layers: a plan's numbers first.
    """

    attend: Launch
    reduce: Launch | None
    shared: list[mx.array]

    def __call__(
        self, queries: mx.array, arrays: Sequence[mx.array], sink_logits: mx.array | None = None
    ) -> list[mx.array]:
        """Outputs (T, heads * V); and log-sum-exps (T, heads) float32, where they are asked for.

        Args:
            queries: (T, heads, D).
            arrays: `arrays_of` the layer's keys and values.
            sink_logits: (heads,), where the attention was made for such.
        """
        logits = [] if sink_logits is None else [sink_logits]
        results = self.attend([queries, *arrays, *self.shared, *logits])
        if self.reduce is None:
            return results
        return self.reduce([*results, self.shared[0], *logits])


Sizes = dict[str, Any]
"""The shapes and dtypes of what a launch puts down, as arguments of `Launch`."""


def partial_sizes(num_items: int, heads: int, num_rows: int, dim: int) -> Sizes:
    """Of a first pass that splits sequences.

    Partials (items, H, R, V) and their peaks and totals (items, H, R, 2), float32.
    """
    rows = (num_items, heads, num_rows)
    return Sizes(output_shapes=[(*rows, dim), (*rows, 2)], output_dtypes=[mx.float32, mx.float32])


def output_sizes(rows: tuple[int, int], dim: int, dtype: mx.Dtype, *, log_sums: bool) -> Sizes:
    """Of the last pass.

    Outputs (T, heads * V) and, where asked for, log-sum-exps (T, heads) float32.

    Args:
        rows: T and heads.
    """
    outputs = rows[0], rows[1] * dim
    if log_sums:
        return Sizes(output_shapes=[outputs, rows], output_dtypes=[dtype, mx.float32])
    return Sizes(output_shapes=[outputs], output_dtypes=[dtype])


def reduction(
    rows: tuple[int, int],
    max_places: int,
    dim: int,
    dtype: mx.Dtype,
    *,
    sinks: bool,
    log_sums: bool,
) -> Launch:
    """The second pass, from partials, peaks and totals, and a plan's numbers to `output_sizes`.

    Sink logits, where there are any, are its last input.

    Args:
        rows: T and heads.
        max_places: sequences times the queries that one may have.
        dim: V.
        dtype: of the outputs.
        sinks: there are sink logits.
        log_sums: log-sum-exps are asked for.
    """
    return Launch(
        _kernel(sinks, log_sums),
        template=[("T", dtype), ("DIM", dim), ("SINKS", sinks), ("LOG_SUMS", log_sums)],
        grid=(LANES * REDUCERS, rows[1], max_places),
        threadgroup=(LANES * REDUCERS, 1, 1),
        **output_sizes(rows, dim, dtype, log_sums=log_sums),
    )


@cache
def _kernel(sinks: bool, log_sums: bool) -> MetalKernel:
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
    """The last input of kernels of a layer with sink logits."""
    return ("sink_logits",) if sinks else ()
