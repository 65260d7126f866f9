"""Multi-head latent attention (MLA) as a mixer.

The cache keeps one vector of `latent_dim + rope_dim` numbers for each token. The keys and values of
all heads follow from it. For a long segment they are expanded. For a short one the expansion is
absorbed into queries and outputs, so attention runs over the latent vectors themselves. Source:
DeepSeek-V2, arXiv 2405.04434.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache_specs import LatentSpec
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import Mixer
from .linear import HeadLinear, Projection
from .norm import Norm
from .pooled_index import GatedIndexer
from .rope import QueryScale
from .step import Rope, Step


class LatentProjection:
    """From latent vectors to the keys and values of H heads, and the same absorbed.

    Args:
        key: each head's matrix between latent vectors (r) and keys (dn).
        value: each head's matrix from latent vectors (r) to values (dv).
        dims: dn and dv.
        key_reads_latent: `key` is stored (H, dn, r), as on the hub; else (H, r, dn), as MLX
            checkpoints have it.
    """

    __slots__ = ("key", "key_dim", "key_reads_latent", "value_dim", "value_proj")

    def __init__(
        self, key: HeadLinear, value: HeadLinear, dims: tuple[int, int], *, key_reads_latent: bool
    ) -> None:
        self.key = key
        self.key_dim, self.value_dim = dims
        self.value_proj = value
        self.key_reads_latent = key_reads_latent

    def absorb(self, q_nope: mx.array) -> mx.array:
        """q_nope (N, H, dn) -> (N, H, r): its product with a latent vector is q_nope · k_nope."""
        absorbed = self.key(q_nope.swapaxes(0, 1), transposed=not self.key_reads_latent)
        return absorbed.swapaxes(0, 1)

    def value(self, outputs: mx.array) -> mx.array:
        """Weighted sums of latent vectors (N, H, r) -> the same of values (N, H, dv)."""
        return self.value_proj(outputs.swapaxes(0, 1), transposed=True).swapaxes(0, 1)

    def expand(self, latent: mx.array) -> tuple[mx.array, mx.array]:
        """latent (S, r) -> keys without their rotary part (S, H, dn), and values (S, H, dv)."""
        keys = self.key(latent[None], transposed=self.key_reads_latent)  # (H, S, dn)
        values = self.value_proj(latent[None], transposed=True)
        return keys.swapaxes(0, 1), values.swapaxes(0, 1)


@dataclass(slots=True, eq=False, kw_only=True)
class LatentAttention(Mixer):
    """Queries of H heads, one latent vector a token, then the latent cache."""

    # (T, hidden) -> (T, H * (dn + dr)), one after the other: one, or two with a norm between them
    q_projs: Sequence[Projection | Norm]
    kv_a_proj: Projection  # (T, hidden) -> (T, r + dr), the latent vector and the shared rotary key
    kv_a_norm: Norm  # over the latent vector
    projection: LatentProjection  # from latent vectors to keys and values
    o_proj: Projection  # (T, H * dv) -> (T, hidden)
    num_heads: int  # H
    spec: LatentSpec  # what the cache keeps for this layer: r and dr
    scale: float  # multiplies the scores
    rope: Rope | None  # over dr numbers; None: positions are not encoded
    rope_scale: float | None = None  # multiplies the rotary part of queries; None: 1
    query_scale: QueryScale | None = None  # factors of queries by their positions; None: 1
    gate_proj: Projection | None = None  # (T, hidden) -> (T, H); its sigmoid multiplies the outputs

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """None: those of attention belong to the cache."""
        return []

    def attend(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the outputs of the heads side by side, (T, H * dv)."""
        queries = x
        for part in self.q_projs[:-1]:
            queries = part(queries)
        chosen = self.more(x, queries, step)
        # (T, H, dn + dr)
        queries = self.q_projs[-1](queries).reshape(x.shape[0], self.num_heads, -1)
        if self.query_scale is not None:
            queries = self.query_scale(queries, step.prepared[self.query_scale])
        q_nope, q_rope = mx.split(queries, [queries.shape[-1] - self.spec.rope_dim], axis=-1)
        latent, k_rope = mx.split(self.kv_a_proj(x), [self.spec.latent_dim], axis=-1)
        k_rope = k_rope[:, None]
        if self.rope is not None:
            qk_rope = mx.concatenate([q_rope, k_rope], axis=1)
            rotated = self.rope(qk_rope, step.prepared[self.rope])
            q_rope, k_rope = mx.split(rotated, [self.num_heads], axis=1)
        if self.rope_scale is not None:
            q_rope = q_rope * self.rope_scale
        outputs: mx.array = step.caches[self].attend(
            q_nope,
            q_rope,
            self.kv_a_norm(latent),
            k_rope[:, 0],
            projection=self.projection,
            scale=self.scale,
            **chosen,
        )
        if self.gate_proj is not None:
            outputs = outputs * mx.sigmoid(self.gate_proj(x))[..., None]  # (T, H, dv)
        return outputs.flatten(1)

    def more(self, x: mx.array, compressed: mx.array, step: Step) -> dict[str, Any]:
        """More arguments of the cache's `attend`; `compressed`: the last projection's input."""
        return {}

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (R, hidden), plus the residual."""
        return self.o_proj(step.read_checked(self.attend(x, step)), residual)


@dataclass(slots=True, eq=False, kw_only=True)
class Indexer:
    """Ranks tokens by a few small heads, for a layer that sees the best of them."""

    q_proj: Projection  # (T, q_lora_rank) -> (T, Hi * di), of the queries' compressed form
    k_proj: Projection  # (T, hidden) -> (T, di)
    k_norm: Norm  # over keys
    weights_proj: Projection  # (T, hidden) -> (T, Hi), a weight of each head
    num_heads: int  # Hi
    rope: Rope  # over the first numbers of queries and keys
    scale: float  # multiplies the weights

    def __call__(
        self, x: mx.array, compressed: mx.array, step: Step
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Queries (T, Hi, di), weights (T, Hi) and keys (T, di) of x (T, hidden).

        `compressed`: the queries' compressed form (T, q_lora_rank).
        """
        queries = self.q_proj(compressed).reshape(x.shape[0], self.num_heads, -1)  # (T, Hi, di)
        qk = mx.concatenate([queries, self.k_norm(self.k_proj(x))[:, None]], axis=1)
        rotated = self.rope(qk, step.prepared[self.rope])
        queries, keys = mx.split(rotated, [self.num_heads], axis=1)
        return queries, self.weights_proj(x) * self.scale, keys[:, 0]


class RankedAttention(LatentAttention):
    """Latent attention to the tokens that an indexer ranks highest (DeepSeek-V3.2, 2512.02556).

    Args:
        indexer: of the layer; None: it sees the tokens that an earlier layer's indexer chose.
        others: see `LatentAttention`.
    """

    __slots__ = ("indexer",)

    def __init__(self, indexer: Indexer | None, **others: Any) -> None:
        super().__init__(**others)
        self.indexer = indexer

    def more(self, x: mx.array, compressed: mx.array, step: Step) -> dict[str, Any]:
        if self.indexer is not None:
            step.index = (*self.indexer(x, compressed, step), {})
        return {"index": step.index}


class PooledAttention(LatentAttention):
    """Latent attention to the blocks of tokens that an index ranks highest (GLM5-Next).

    Args:
        indexer: of the layer; None: it sees the tokens that the layer before it sees.
        others: see `LatentAttention`.
    """

    __slots__ = ("indexer",)

    def __init__(self, indexer: GatedIndexer | None, **others: Any) -> None:
        super().__init__(**others)
        self.indexer = indexer

    @property
    def parts(self) -> Sequence[Mixer]:
        return (self,) if self.indexer is None else (self, self.indexer)

    def more(self, x: mx.array, compressed: mx.array, step: Step) -> dict[str, Any]:
        """The choice of the indexer, which the next layer may share."""
        if self.indexer is not None:
            step.index = self.indexer(x, step, compressed)
        return {"choice": step.index}
