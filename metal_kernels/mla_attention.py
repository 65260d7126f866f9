"""Attention over a latent cache (MLA): the Metal kernel and its plain-MLX twin.

Every head has the same key, a latent vector and a rotary part, and the latent vector is its value
too. T = query tokens of all sequences, D = numbers of a key, V = numbers of the latent vector.
Source: DeepSeek-V2, arXiv:2405.04434, with the projections absorbed into queries and outputs.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .attention_plan import AttentionPlan
from .attention_reduce import includes, output_sizes, partial_sizes, reduction
from .attention_shape import LANES
from .launch import Launch, MetalKernel
from .paged_attention_gather import paged_attention_gathered
from .paged_attention_passes import DTYPES
from .stored import Stored, decoded, is_plain, part_names, plane_text, stored_bits

DIMS = ((576, 512),)
TEAM_ROWS = 16  # query rows of a threadgroup
THREADS = 8 * LANES


@cache
def _kernel(plain: bool) -> MetalKernel:
    return MetalKernel(
        name="mla_attention",
        inputs=(
            "queries",
            *part_names("tail", plain=plain),
            *part_names("latent", plain=plain),
            *("plan", "pages", "scale"),
        ),
        outputs=("outputs", "figures"),
        includes=includes(plain=plain),
        body=f"""
  constexpr int PARTIAL = TEAM * SCORES;
  threadgroup float scores[PARTIAL];
  mla_attention<KEY_DIM, VALUE_DIM, SPLIT, true>(
      queries, plane_of<BITS, KEY_DIM, 0>({plane_text("tail", "latent", plain=plain)}),
      StepPlan{{plan}}, pages, scale, queries_shape[1], latent_codes_shape[1],
      outputs, figures, scores,
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
""",
    )


def mla_attention_on_metal(
    queries: mx.array, latents: Stored, plan: AttentionPlan, *, scale: float, value_dim: int = 512
) -> list[mx.array]:
    """Attention of 1 to 8 queries of each sequence over its pages and its tail.

    Args:
        queries: (T, heads, D), those of the plan's first sequence first.
        latents: one vector of D numbers a token under one head, plain or in 8 bits.
        plan: of the step and the layer's group, planned for `row_blocks` KV heads.
        scale: multiplies the scores.
        value_dim: V; the first V numbers of a token's vector are its value.

    Returns:
        outputs (T, heads, V) in the queries' dtype, and the logarithm of each softmax's
        denominator (T, heads) float32.

    Raises:
        ValueError: no kernel has these sizes; `mla_attention_gathered` takes any.
    """
    assert len(queries) == plan.num_queries, (queries.shape, plan.num_queries)
    rows, factor = (len(queries), queries.shape[1]), mx.array(scale, dtype=mx.float32)
    attend = _attend(queries, latents, plan, value_dim)
    results = attend([queries, *latents.tails, *latents.pages, plan.numbers, plan.pages, factor])
    if plan.is_split:
        places = plan.num_seqs * plan.max_queries
        reduce = reduction(rows, places, value_dim, queries.dtype, sinks=False, log_sums=True)
        results = reduce([*results, plan.numbers])
    return [results[0].reshape(*rows, value_dim), results[1]]


def _attend(queries: mx.array, latents: Stored, plan: AttentionPlan, value_dim: int) -> Launch:
    """The first pass."""
    num_tokens, num_heads, dim = queries.shape
    bits = stored_bits(latents, dim)
    _check(queries.dtype, (dim, value_dim), bits)
    num_rows = plan.max_queries * num_heads
    if plan.is_split:
        sizes = partial_sizes(plan.num_items, 1, num_rows, value_dim)
    else:
        sizes = output_sizes((num_tokens, num_heads), value_dim, queries.dtype, log_sums=True)
    return Launch(
        _kernel(is_plain(latents)),
        template=[
            ("T", queries.dtype),
            ("BITS", bits),
            ("KEY_DIM", dim),
            ("VALUE_DIM", value_dim),
            ("SPLIT", plan.is_split),
        ],
        grid=(plan.num_items * THREADS, row_blocks(num_rows), 1),
        threadgroup=(THREADS, 1, 1),
        **sizes,
    )


def row_blocks(num_rows: int) -> int:
    """Threadgroups that share the query rows of a sequence; each reads the latents again."""
    return -(-num_rows // TEAM_ROWS)


@dataclass(frozen=True, slots=True)
class _Plain:
    pages: list[mx.array]
    tails: list[mx.array]
    tail_head: int = 0
    tail_heads: int = 1
    first: int = 0
    vector_dim: int = 0


def mla_attention_gathered(
    queries: mx.array, latents: Stored, plan: AttentionPlan, *, scale: float, value_dim: int = 512
) -> list[mx.array]:
    """The plain-MLX twin, as `mla_attention_on_metal`; simple rather than fast."""
    dim = queries.shape[-1]
    values = _Plain(
        [decoded(latents.pages, dim)[..., :value_dim]],
        [decoded(latents.tails, dim)[..., :value_dim]],
    )
    return paged_attention_gathered(
        queries, latents, values, plan, scale=scale, value_dim=value_dim, log_sums=True
    )


def _check(dtype: mx.Dtype, dims: tuple[int, int], bits: int) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"queries are {dtype}; the kernel takes floats of 16 or 32 bits")
    if dims not in DIMS:
        raise ValueError(f"latent dims {dims}; the kernel has {DIMS}")
    if bits not in (0, 8):
        raise ValueError(f"latents of {bits} bits; the kernel takes plain ones and 8 bits")
