"""Paged attention through Metal kernels. Knows arrays; no step, no scheduler.

T = query tokens of all sequences, H = KV heads, G = query heads per KV head, D = key dim,
V = value dim.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .attention_plan import AttentionPlan
from .paged_attention_passes import Asked, Passes, passes_of
from .stored import Stored, stored_bits


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

    rest: list[mx.array]  # inputs that all layers share: of the plan, and (2,) scale and soft cap
    passes: Passes

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
            bits=(
                stored_bits(keys, joint_dim or key_dim),
                stored_bits(values, joint_dim or value_dim),
            ),
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
        rest = [plan.numbers, plan.pages, _numbers(scale, soft_cap or 0.0)]
        return PagedAttention(rest, passes_of(asked))

    def __call__(
        self,
        queries: mx.array,
        keys: Stored,
        values: Stored,
        sink_logits: mx.array | None,
    ) -> list[mx.array]:
        """As `paged_attention_on_metal`, but outputs are (T, H * G * V)."""
        attend, reduce = self.passes
        own_tails = [] if values.tail_head or keys.first else values.tails
        own_pages = [] if keys.first else values.pages
        logits = [] if sink_logits is None else [sink_logits]
        results = attend(
            [
                queries,
                *keys.tails,
                *keys.pages,
                *own_tails,
                *own_pages,
                *self.rest,
                *logits,
            ]
        )
        return results if reduce is None else reduce([*results, self.rest[0], *logits])


@cache
def _numbers(scale: float, soft_cap: float) -> mx.array:
    """The same for every step of a layer."""
    return mx.array([scale, soft_cap], mx.float32)
