"""The Metal kernels of paged attention: checks, variants, launches. Knows no step, no scheduler.

T = query tokens of all sequences, H = KV heads, G = query heads per KV head, D = key dim,
V = value dim.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

from .attention_plan import AttentionPlan
from .attention_reduce import (
    NO_FIGURES,
    includes,
    output_sizes,
    partial_sizes,
    reduction,
    sink_names,
)
from .attention_shape import Shape, threadgroup_shape
from .launch import Launch, MetalKernel, TemplateValue
from .stored import Stored, part_names, plane_text, stored_bits

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MAX_ROWS = 128  # query tokens of a sequence times query heads per KV head
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MAX_PASSES = 64  # whose launches are remembered: steps like the one before make the same

STREAMED = """
  constexpr int QUERIES = FRAGMENTS * 8 * KEY_DIM * sizeof(T) / sizeof(float4);
  constexpr int FIGURES = STREAMS * FRAGMENTS * 8 * 2;
  constexpr int SLICES = STREAMS * 8 * slice_width(VALUE_DIM);
  threadgroup float4 shared_queries[QUERIES];
  threadgroup float shared_figures[FIGURES];
  threadgroup float slices[SLICES];
  paged_attention<KEY_DIM, VALUE_DIM, FRAGMENTS, SPLIT, SINKS, LOG_SUMS>(ARGUMENTS,
      reinterpret_cast<threadgroup T*>(shared_queries), shared_figures, slices, POSITION);
"""
SHARED = """
  constexpr int MERGED = SIMD_GROUPS * 8 * (FRAGMENTS * 2 + slice_width(VALUE_DIM));
  constexpr int SCRATCH = scratch_floats(
      KEY_DIM + VALUE_DIM, sizeof(T), PARTNERS == 1 ? 0 : MERGED) / 4;
  threadgroup float4 scratch[SCRATCH];
  paged_attention_shared<
      KEY_DIM, VALUE_DIM, FRAGMENTS, SIMD_GROUPS, PARTNERS, SPLIT, SINKS, LOG_SUMS>(
      ARGUMENTS, reinterpret_cast<threadgroup float*>(scratch), POSITION);
"""
POSITION = """
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup"""


class Traits(NamedTuple):
    """What decides which arrays a kernel has: each of them costs something in every layer."""

    plain_keys: bool
    plain_values: bool
    shared_tails: bool  # of keys and values
    sinks: bool
    figures: bool  # beside the outputs


@cache
def _kernel(shares: bool, traits: Traits) -> MetalKernel:
    """The one that shares tiles, or the one that streams, with arrays for these traits."""
    value_tails = "tail" if traits.shared_tails else "value_tail"
    tail_heads = ("2 * " if traits.shared_tails else "") + "key_codes_shape[0]"
    arguments = f"""
      queries, plane_of<KEY_BITS, KEY_DIM>({plane_text("tail", "key", plain=traits.plain_keys)}),
      plane_of<VALUE_BITS, VALUE_DIM>(
          {plane_text(value_tails, "value", plain=traits.plain_values)}),
      {"sink_logits" if traits.sinks else "queries"}, StepPlan{{plan}}, pages, numbers,
      queries_shape[1], key_codes_shape[0], {tail_heads}, key_codes_shape[1],
      outputs, {"figures" if traits.figures else NO_FIGURES}"""
    return MetalKernel(
        name="paged_attention_shared" if shares else "paged_attention",
        inputs=(
            "queries",
            *part_names("tail", plain=traits.plain_keys),
            *part_names("key", plain=traits.plain_keys),
            *([] if traits.shared_tails else part_names("value_tail", plain=traits.plain_values)),
            *part_names("value", plain=traits.plain_values),
            *("plan", "pages", "numbers"),
            *sink_names(sinks=traits.sinks),
        ),
        outputs=("outputs", "figures") if traits.figures else ("outputs",),
        includes=includes(plain=traits.plain_keys and traits.plain_values),
        body=(SHARED if shares else STREAMED)
        .replace("ARGUMENTS", arguments)
        .replace("POSITION", POSITION),
    )


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
    attention = PagedAttention.of(
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
    outputs, *sums = attention(queries, keys, values, sink_logits)
    return [outputs.reshape(*queries.shape[:2], -1), *sums]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One attention, the same for all layers of a step with the same sizes."""

    numbers: mx.array  # of the plan
    rest: list[mx.array]  # inputs that all layers share: of the plan, and (2,) scale and soft cap
    passes: "Passes"

    @staticmethod
    def of(
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
    ) -> "PagedAttention":
        """For arrays of these sizes; arguments and errors of `paged_attention_on_metal`.

        Args:
            sinks: there are sink logits.
        """
        num_tokens, num_heads, key_dim = queries.shape
        value_dim = value_dim or key_dim
        assert num_tokens == plan.num_queries, (queries.shape, plan.num_queries)
        asked = Asked(
            rows=(num_tokens, num_heads),
            kv_heads=keys.pages[0].shape[0],
            dims=(key_dim, value_dim),
            dtype=queries.dtype,
            bits=(stored_bits(keys, key_dim), stored_bits(values, value_dim)),
            shared_tails=values.tail_head > 0,
            sinks=sinks,
            log_sums=log_sums,
            num_seqs=plan.num_seqs,
            num_items=plan.num_items,
            max_queries=plan.max_queries,
        )
        rest = [plan.numbers, plan.pages, _numbers(scale, soft_cap or 0.0)]
        return PagedAttention(plan.numbers, rest, _passes(asked))

    def __call__(
        self,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        sink_logits: mx.array | None,
    ) -> list[mx.array]:
        """As `paged_attention_on_metal`, but outputs are (T, H * G * V)."""
        attend, reduce = self.passes
        own_tails = [] if values.tail_head else values.tails
        logits = [] if sink_logits is None else [sink_logits]
        results = attend(
            [
                queries,
                *keys.tails,
                *keys.pages,
                *own_tails,
                *values.pages,
                *self.rest,
                *logits,
            ]
        )
        return results if reduce is None else reduce([*results, self.numbers, *logits])


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

    @property
    def is_split(self) -> bool:
        """There are more items than sequences."""
        return self.num_items > self.num_seqs


class Passes(NamedTuple):
    """The launches of one attention."""

    attend: Launch
    reduce: Launch | None  # where a sequence is split


@lru_cache(MAX_PASSES)
def _passes(asked: Asked) -> Passes:
    num_rows = asked.max_queries * (asked.rows[1] // asked.kv_heads)
    check_sizes(asked.dtype, asked.dims, num_rows)
    key_dim, value_dim = asked.dims
    shape = threadgroup_shape(
        num_rows, key_dim=key_dim, value_dim=value_dim, itemsize=asked.dtype.size
    )
    figures = asked.is_split or asked.log_sums
    traits = Traits(
        asked.bits[0] == 0, asked.bits[1] == 0, asked.shared_tails, asked.sinks, figures
    )
    if asked.is_split:
        sizes = partial_sizes(asked.num_items, asked.kv_heads, num_rows, value_dim)
    else:
        sizes = output_sizes(asked.rows, value_dim, asked.dtype, log_sums=asked.log_sums)
    attend = Launch(
        _kernel(shape.shares, traits),
        template=[
            ("T", asked.dtype),
            ("KEY_BITS", asked.bits[0]),
            ("VALUE_BITS", asked.bits[1]),
            ("KEY_DIM", key_dim),
            ("VALUE_DIM", value_dim),
            ("SPLIT", asked.is_split),
            ("SINKS", asked.sinks),
            ("LOG_SUMS", asked.log_sums and not asked.is_split),
            *_shape_template(shape),
        ],
        grid=(asked.num_items * shape.threads, asked.kv_heads, 1),
        threadgroup=(shape.threads, 1, 1),
        **sizes,
    )
    if not asked.is_split:
        return Passes(attend, None)
    reduce = reduction(
        asked.rows,
        asked.num_seqs * asked.max_queries,
        value_dim,
        asked.dtype,
        sinks=asked.sinks,
        log_sums=asked.log_sums,
    )
    return Passes(attend, reduce)


@cache
def _numbers(scale: float, soft_cap: float) -> mx.array:
    """The same for every step of a layer."""
    return mx.array([scale, soft_cap], mx.float32)


def check_sizes(dtype: mx.Dtype, dims: tuple[int, int], num_rows: int) -> None:
    """Raise ValueError where no kernel fits."""
    if dtype not in DTYPES:
        raise ValueError(f"queries are {dtype}; the kernels take floats of 16 or 32 bits")
    if not set(dims) <= set(HEAD_DIMS):
        raise ValueError(f"head dims {dims}; the kernels have {HEAD_DIMS}")
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} query rows of a KV head; the kernels take up to {MAX_ROWS}")


def _shape_template(shape: Shape) -> list[tuple[str, TemplateValue]]:
    found: list[tuple[str, TemplateValue]] = [("FRAGMENTS", shape.fragments)]
    if shape.shares:
        found += [("SIMD_GROUPS", shape.simd_groups), ("PARTNERS", shape.partners)]
    return found
