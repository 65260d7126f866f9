"""The Metal kernels of paged attention: checks, variants, launches. Knows no step, no scheduler.

T = query tokens of all sequences, H = KV heads, G = query heads per KV head, D = key dim,
V = value dim.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .attention_plan import AttentionPlan
from .attention_reduce import INCLUDES, reduction, result_sizes
from .attention_shape import Shape, threadgroup_shape
from .launch import Launch, MetalKernel, TemplateValue
from .stored import Stored, is_plain, plane_arrays, plane_names, plane_text, stored_bits

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MAX_ROWS = 128  # query tokens of a sequence times query heads per KV head
DTYPES = (mx.bfloat16, mx.float16, mx.float32)

STREAMED = """
  constexpr int QUERIES = FRAGMENTS * 8 * KEY_DIM * sizeof(T) / sizeof(float4);
  constexpr int FIGURES = STREAMS * FRAGMENTS * 8 * 2;
  constexpr int SLICES = STREAMS * 8 * slice_width(VALUE_DIM);
  threadgroup float4 shared_queries[QUERIES];
  threadgroup float shared_figures[FIGURES];
  threadgroup float slices[SLICES];
  paged_attention<KEY_DIM, VALUE_DIM, FRAGMENTS, SPLIT, SINKS>(ARGUMENTS,
      reinterpret_cast<threadgroup T*>(shared_queries), shared_figures, slices, POSITION);
"""
SHARED = """
  constexpr int MERGED = SIMD_GROUPS * 8 * (FRAGMENTS * 2 + slice_width(VALUE_DIM));
  constexpr int SCRATCH = scratch_floats(
      KEY_DIM + VALUE_DIM, sizeof(T), PARTNERS == 1 ? 0 : MERGED) / 4;
  threadgroup float4 scratch[SCRATCH];
  paged_attention_shared<KEY_DIM, VALUE_DIM, FRAGMENTS, SIMD_GROUPS, PARTNERS, SPLIT, SINKS>(
      ARGUMENTS, reinterpret_cast<threadgroup float*>(scratch), POSITION);
"""
POSITION = """
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup"""


@cache
def _kernel(shares: bool, plain_keys: bool, plain_values: bool) -> MetalKernel:
    """With as many inputs as these formats have parts: each costs something in every layer."""
    arguments = f"""
      queries, plane_of<KEY_BITS, KEY_DIM>({plane_text("key", plain=plain_keys)}),
      plane_of<VALUE_BITS, VALUE_DIM>({plane_text("value", plain=plain_values)}), sink_logits,
      spans, pages, work, sizes, numbers, queries_shape[1], key_codes_shape[0],
      key_tail_codes_shape[1], key_codes_shape[1],
      outputs, figures"""
    return MetalKernel(
        name="paged_attention_shared" if shares else "paged_attention",
        inputs=(
            "queries",
            *plane_names("key", plain=plain_keys),
            *plane_names("value", plain=plain_values),
            *("sink_logits", "spans", "pages", "work", "sizes", "numbers"),
        ),
        outputs=("outputs", "figures"),
        includes=INCLUDES,
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
) -> tuple[mx.array, mx.array]:
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

    Returns:
        outputs (T, H * G, V) in the queries' dtype, and the logarithm of each softmax's
        denominator, sink logits included, (T, H * G) float32.

    Raises:
        ValueError: no kernel has these sizes; `paged_attention_gathered` takes any.
    """
    prepared = PagedAttention.of(
        queries, keys, values, plan, sinks=sink_logits is not None, value_dim=value_dim
    )
    return prepared(queries, keys, values, scale, sink_logits, soft_cap)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The launches of one attention, the same for all layers of a step with the same sizes."""

    plan: AttentionPlan
    attend: Launch
    reduce: Launch | None  # where a sequence is split

    @staticmethod
    def of(
        queries: mx.array,
        keys: Stored,
        values: Stored,
        plan: AttentionPlan,
        *,
        sinks: bool,
        value_dim: int | None = None,
    ) -> "PagedAttention":
        """Launches for arrays of these sizes; arguments and errors of `paged_attention_on_metal`.

        Args:
            sinks: there are sink logits.
        """
        num_heads, key_dim = queries.shape[1:]
        value_dim = value_dim or key_dim
        heads = keys.pages[0].shape[0]
        num_rows = plan.max_queries * (num_heads // heads)
        check_sizes(queries, (key_dim, value_dim), num_rows)
        assert len(queries) == plan.num_queries, (queries.shape, plan.num_queries)
        shape = threadgroup_shape(
            num_rows, key_dim=key_dim, value_dim=value_dim, itemsize=queries.dtype.size
        )
        attend = Launch(
            _kernel(shape.shares, is_plain(keys), is_plain(values)),
            template=[
                ("T", queries.dtype),
                ("KEY_BITS", stored_bits(keys, key_dim)),
                ("VALUE_BITS", stored_bits(values, value_dim)),
                ("KEY_DIM", key_dim),
                ("VALUE_DIM", value_dim),
                ("SPLIT", plan.is_split),
                ("SINKS", sinks),
                *_shape_template(shape),
            ],
            grid=(plan.num_items * shape.threads, heads, 1),
            threadgroup=(shape.threads, 1, 1),
            **result_sizes(queries, plan, heads, value_dim),
        )
        return PagedAttention(plan, attend, reduction(queries, plan, value_dim, sinks=sinks))

    def __call__(
        self,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        scale: float,
        sink_logits: mx.array | None,
        soft_cap: float | None = None,
    ) -> tuple[mx.array, mx.array]:
        """As `paged_attention_on_metal`."""
        plan = self.plan
        logits = queries if sink_logits is None else sink_logits  # none are not read
        results = self.attend(
            [
                queries,
                *plane_arrays(keys),
                *plane_arrays(values),
                *(logits, plan.spans, plan.pages, plan.work, plan.sizes),
                _numbers(scale, soft_cap or 0.0),
            ]
        )
        if self.reduce is not None:
            results = self.reduce([*results, logits, plan.spans, plan.sizes])
        outputs, log_sum_exps = results
        return outputs, log_sum_exps


@cache
def _numbers(scale: float, soft_cap: float) -> mx.array:
    """The same for every step of a layer."""
    return mx.array([scale, soft_cap], mx.float32)


def check_sizes(queries: mx.array, dims: tuple[int, int], num_rows: int) -> None:
    """Raise ValueError where no kernel fits."""
    if queries.dtype not in DTYPES:
        raise ValueError(f"queries are {queries.dtype}; the kernels take floats of 16 or 32 bits")
    if not set(dims) <= set(HEAD_DIMS):
        raise ValueError(f"head dims {dims}; the kernels have {HEAD_DIMS}")
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} query rows of a KV head; the kernels take up to {MAX_ROWS}")


def _shape_template(shape: Shape) -> list[tuple[str, TemplateValue]]:
    found: list[tuple[str, TemplateValue]] = [("FRAGMENTS", shape.fragments)]
    if shape.shares:
        found += [("SIMD_GROUPS", shape.simd_groups), ("PARTNERS", shape.partners)]
    return found
