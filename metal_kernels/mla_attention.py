"""Attention over a latent cache (MLA): the Metal kernel and its plain-MLX twin.

Every head has the same key, a latent vector and a rotary part, and the latent vector is its value
too. T = query tokens of all sequences, D = numbers of a key, V = numbers of the latent vector.
Source: DeepSeek-V2, arXiv:2405.04434, with the projections absorbed into queries and outputs.
"""

from functools import cache

import mlx.core as mx

from .attention_plan import LANES, AttentionPlan
from .launch import Launch, MetalKernel
from .paged_attention import (
    DTYPES,
    Asked,
    AttentionCall,
    Sizes,
    Softmax,
    attention_call,
    includes,
    paged_attention_gathered,
    passes,
)
from .stored import KVFormat, Plane, part_names, plane_text

DIMS = ((576, 512), (512, 512))  # of keys and values: with a rotary part, and without
KINDS = (0, 8)  # bits of latents
TEAM_ROWS = 16  # query rows of a threadgroup
THREADS = 8 * LANES


@cache
def _kernel(fmt: KVFormat) -> MetalKernel:
    return MetalKernel(
        name="mla_attention",
        inputs=(
            "queries",
            *part_names("tail", fmt),
            *part_names("latent", fmt),
            "plan", "pages", "scale",
        ),
        outputs=("outputs", "figures"),
        includes=includes([fmt]),
        body=f"""
  constexpr int PARTIAL = TEAM * SCORES;
  threadgroup float scores[PARTIAL];
  mla_attention<KEY_DIM, VALUE_DIM, SPLIT, true>(
      queries, plane_of<BITS, KEY_DIM, 0>({plane_text("tail", "latent", fmt)}),
      StepPlan{{plan}}, pages, scale, queries_shape[1], latent_codes_shape[1],
      outputs, figures, scores,
      threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
""",
    )  # fmt: skip


def mla_attention_on_metal(
    queries: mx.array, latents: Plane, plan: AttentionPlan, *, scale: float, value_dim: int = 512
) -> list[mx.array]:
    """Attention of 1 to 8 queries of each sequence over its pages and its tail.

    Args:
        queries: (T, heads, D), those of the plan's first sequence first.
        latents: one vector of D numbers a token under one head, plain or in 8 bits.
        plan: of the step and the layer's group, planned for `row_blocks` KV heads.
        value_dim: V; the first V numbers of a token's vector are its value.

    Returns:
        outputs (T, heads, V) in the queries' dtype, and the logarithm of each softmax's
        denominator (T, heads) float32.
    """
    attention = mla_attention(queries, latents, plan, scale=scale, value_dim=value_dim)
    outputs, sums = attention(queries, [*latents.tails, *latents.pages])
    return [outputs.reshape(*queries.shape[:2], value_dim), sums]


def mla_attention(
    queries: mx.array, latents: Plane, plan: AttentionPlan, *, scale: float, value_dim: int
) -> AttentionCall:
    """The kernel for arrays of these sizes; same arguments as `mla_attention_on_metal`."""
    num_tokens, num_heads, dim = queries.shape
    assert num_tokens == plan.num_queries, (queries.shape, plan.num_queries)
    asked = Asked(
        rows=(num_tokens, num_heads),
        kv_heads=1,
        dims=(dim, value_dim),
        dtype=queries.dtype,
        formats=(latents.fmt, latents.fmt),
        sinks=False,
        log_sums=True,
        num_spans=plan.num_spans,
        num_items=plan.num_items,
        max_queries=plan.max_queries,
    )
    return attention_call(passes(asked, _attend), plan, mx.array(scale, dtype=mx.float32))


def _attend(asked: Asked, sizes: Sizes) -> Launch:
    fmt = asked.formats[0]
    assert asked.dtype in DTYPES, asked
    assert asked.dims in DIMS, asked
    assert fmt.bits in KINDS, asked
    return Launch(
        _kernel(fmt),
        template=[
            ("T", asked.dtype),
            ("BITS", fmt.bits),
            ("KEY_DIM", asked.dims[0]),
            ("VALUE_DIM", asked.dims[1]),
            ("SPLIT", asked.is_split),
        ],
        grid=(asked.num_items * THREADS, row_blocks(asked.num_rows), 1),
        threadgroup=(THREADS, 1, 1),
        **sizes,
    )


def row_blocks(num_rows: int) -> int:
    """Threadgroups that share the query rows of a sequence; each reads the latents again."""
    return -(-num_rows // TEAM_ROWS)


def mla_attention_gathered(
    queries: mx.array, latents: Plane, plan: AttentionPlan, *, scale: float, value_dim: int = 512
) -> list[mx.array]:
    """The plain-MLX twin, as `mla_attention_on_metal`; simple rather than fast."""
    return paged_attention_gathered(
        queries,
        latents,
        latents.cut(0, value_dim),
        plan,
        Softmax(scale),
        value_dim=value_dim,
        log_sums=True,
    )
