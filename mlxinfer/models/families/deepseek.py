"""DeepSeek V2, V3 and V3.2: latent attention, and experts in groups beside shared ones. Youtu."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx

from ...cache_specs import LatentSpec
from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention import LayerMixer
from ...layers.latent_attention import Indexer, LatentAttention, LatentProjection, RankedAttention
from ...layers.linear import Projection
from ...layers.mlp import FeedForward
from ...layers.moe import ExpertChoice
from ...layers.norm import LayerNorm, Norm
from ...layers.rope import RopeSpec, rotary_order, yarn_magnitude
from ...metal_kernels.routing import SUM_EPS, Routing
from ..config import ModelConfig
from ..family import Family, MTPForm
from ..jsonfields import Fields

PLAIN_ROUTING: Mapping[str, Any] = {  # of configs: one group, weights that sum to 1, no factor
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_LATENT: Mapping[str, Any] = {  # of configs: sizes of attention
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
}
_INNER_EPS = 1e-6  # of the norms inside attention, whatever most families' configs say


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Sizes of latent attention, as a config states them."""

    query_rank: int | None  # None: queries are projected at once
    rank: int
    nope: int  # of a head's key, without positions
    rope: int  # and with
    value: int

    @classmethod
    def of(cls, fields: Fields) -> "LatentDims":
        return cls(
            fields.integer("q_lora_rank", high=2**20, default=None),
            fields.integer("kv_lora_rank", high=2**20),
            fields.integer("qk_nope_head_dim", high=2**14),
            fields.integer("qk_rope_head_dim", low=0, high=2**14),
            fields.integer("v_head_dim", high=2**14),
        )


class V3Experts(Family):
    """The experts of DeepSeek V3, behind any attention."""

    dense_matrices = (".mlp.gate",)

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        return with_experts(config)

    def mlp(self, index: int) -> FeedForward:
        path = f"model.layers.{index}.mlp"
        if not self.config.sparse_layers[index]:
            return super().mlp(index)
        return self.experts(path, self.routing(path), shared=shared_expert(self, path))

    def routing(self, path: str) -> ExpertChoice:
        """Scores of a sigmoid; the best groups by scores with the bias."""
        return biased_routing(self, path)


class DeepseekV3(V3Experts):
    """DeepSeek V3 and R1: a sigmoid router with a bias that balances the experts' load."""

    defaults: ClassVar = {
        **_LATENT,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
    }
    mtp: ClassVar[MTPForm | None] = MTPForm()
    inner_eps: ClassVar[float | None] = _INNER_EPS  # None: that of the config
    folded = (".self_attn.kv_b_proj", ".self_attn.embed_q", ".self_attn.unembed_out")

    @classmethod
    def head_dim(cls, fields: Fields, num_heads: int) -> int:
        """The part of a head that has positions; the other, where none has."""
        dims = LatentDims.of(fields)
        return dims.rope or dims.nope

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        fields, dims = config.fields, LatentDims.of(config.fields)
        if not dims.rope and any(config.ropes):
            raise CheckpointError(f"qk_rope_head_dim in {fields.where} is 0; positions need some.")
        cls.check_routing(fields)
        return replace(
            super().configure(config),
            attention_scale=(dims.nope + dims.rope) ** -0.5 * _yarn_scale(fields, config.ropes[0]),
            latent=LatentSpec(dims.rank, dims.rope),
        )

    @classmethod
    def check_routing(cls, fields: Fields) -> None:
        """Refuse settings that would silently change the answers."""

    # -- attention ------------------------------------------------------------------------------

    def mixer(self, index: int) -> LayerMixer:
        """Latent attention; rotary pairs: see `pairs_apart`."""
        config, weights, dims = self.config, self.weights, LatentDims.of(self.config.fields)
        path, spec = f"model.layers.{index}.self_attn", config.ropes[index]
        latent = config.cache_spec(index)
        assert isinstance(latent, LatentSpec)
        factor = 1.0 if spec is None else spec.attention_factor**2  # which the rope leaves to us
        return self.attention(
            index,
            q_projs=self._query_projections(path, dims),
            kv_a_proj=weights.linear(
                f"{path}.kv_a_proj_with_mqa",
                dims.rank + dims.rope,
                config.hidden_size,
                bias=config.qkv_bias,
                order=self._rope_order(1, dims.rank, dims.rope),
            ),
            kv_a_norm=self.norm(f"{path}.kv_a_layernorm", dims.rank, self.inner_eps),
            projection=self._latent_projection(path, dims),
            o_proj=weights.linear(
                f"{path}.o_proj",
                config.hidden_size,
                config.num_heads * dims.value,
                bias=config.o_bias,
            ),
            num_heads=config.num_heads,
            spec=latent,
            scale=config.attention_scale,
            rope=None if spec is None else self.rope(spec, dims.rope),
            rope_scale=None if factor == 1.0 else factor,
        )

    def attention(self, index: int, **parts: Any) -> LatentAttention:
        return LatentAttention(**parts)

    def _query_projections(self, path: str, dims: LatentDims) -> Sequence[Projection | Norm]:
        config, weights = self.config, self.weights
        rows = config.num_heads * (dims.nope + dims.rope)
        order = self._rope_order(config.num_heads, dims.nope, dims.rope)
        if dims.query_rank is None:
            return [weights.linear(f"{path}.q_proj", rows, config.hidden_size, order=order)]
        return [
            weights.linear(
                f"{path}.q_a_proj", dims.query_rank, config.hidden_size, bias=config.qkv_bias
            ),
            self.norm(f"{path}.q_a_layernorm", dims.query_rank, self.inner_eps),
            weights.linear(f"{path}.q_b_proj", rows, dims.query_rank, order=order),
        ]

    def _rope_order(self, num_heads: int, before: int, rope: int) -> list[int] | None:
        if not self.config.fields.boolean("rope_interleave", default=True):
            return None
        return rotary_order(num_heads, before, rope, before + rope)

    def _latent_projection(self, path: str, dims: LatentDims) -> LatentProjection:
        """Read `kv_b_proj`, as on the hub, or the two matrices that mlx-lm makes of it."""
        weights, heads = self.weights, self.config.num_heads
        if f"{path}.embed_q.weight" in weights:
            key = weights.matrix(f"{path}.embed_q", (heads, dims.rank, dims.nope))
            value = weights.matrix(f"{path}.unembed_out", (heads, dims.value, dims.rank))
            return LatentProjection(
                key.head_linear(),
                value.head_linear(),
                (dims.nope, dims.value),
                key_reads_latent=False,
            )
        width = dims.nope + dims.value
        kv_b = weights.matrix(f"{path}.kv_b_proj", (heads * width, dims.rank)).by_head(heads)
        return LatentProjection(
            kv_b.rows(0, dims.nope).head_linear(),
            kv_b.rows(dims.nope, width).head_linear(),
            (dims.nope, dims.value),
            key_reads_latent=True,
        )


class Youtu(DeepseekV3):
    """Youtu-LLM: the attention of DeepSeek V3, without experts."""

    defaults: ClassVar = {
        **_LATENT,
        "num_attention_heads": 16,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }


class DeepseekV2(DeepseekV3):
    """DeepSeek V2, V2.5 and V2 Lite: a softmax router, with groups or without."""

    defaults: ClassVar = {
        **_LATENT,
        "num_attention_heads": 32,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    }

    @classmethod
    def check_routing(cls, fields: Fields) -> None:
        """Refuse normalised weights: no published model has them, and references disagree."""
        method = fields.text("topk_method")
        if fields.boolean("norm_topk_prob") or method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedModelError(
                f"topk_method {method[:40]!r} with norm_topk_prob "
                f"{fields.boolean('norm_topk_prob')} in {fields.where}: references do not agree on "
                "it; 'greedy' and 'group_limited_greedy' without norm_topk_prob run."
            )

    def routing(self, path: str) -> ExpertChoice:
        """Scores of a softmax; groups by their best expert."""
        fields = self.config.fields
        grouped = fields.text("topk_method") == "group_limited_greedy"
        num_groups, num_best = expert_groups(self.config) if grouped else (1, 1)
        routing = Routing(
            self.config.experts_per_token,
            eps=SUM_EPS,
            factor=fields.number("routed_scaling_factor"),
            num_groups=num_groups,
            num_best=num_best,
        )
        return ExpertChoice(routing)


class DeepseekV32(DeepseekV3):
    """DeepSeek V3.2: a layer sees the tokens that an indexer of its own ranks highest."""

    defaults: ClassVar = {
        **DeepseekV3.defaults,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": False,
    }

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        config, fields = super().configure(config), config.fields
        if LatentDims.of(fields).query_rank is None:
            raise CheckpointError(
                f"{fields.where} has no q_lora_rank; an indexer reads compressed queries."
            )
        latent = config.latent
        assert latent is not None
        width = fields.integer("index_head_dim", low=latent.rope_dim, high=2**14)
        count = fields.integer("index_topk", high=2**31)
        return replace(config, latent=replace(latent, index_dim=width, num_ranked=count))

    def attention(self, index: int, **parts: Any) -> LatentAttention:
        """With the layer's indexer; its rope rotates the first numbers of its heads."""
        config, fields, weights = self.config, self.config.fields, self.weights
        path, spec = f"model.layers.{index}.self_attn.indexer", config.ropes[index]
        dims, heads = LatentDims.of(fields), fields.integer("index_n_heads", high=2**14)
        width = fields.integer("index_head_dim", high=2**14)
        assert dims.query_rank is not None
        assert spec is not None, "positions are always encoded"
        interleaved = fields.boolean("indexer_rope_interleave")
        orders = [
            rotary_order(count, 0, dims.rope, width) if interleaved else None
            for count in (heads, 1)
        ]
        norm = [weights.take(f"{path}.k_norm.{part}", (width,)) for part in ("weight", "bias")]
        if orders[1] is not None:
            norm = [part[mx.array(orders[1])] for part in norm]
        indexer = Indexer(
            q_proj=weights.linear(f"{path}.wq_b", heads * width, dims.query_rank, order=orders[0]),
            k_proj=weights.linear(f"{path}.wk", width, config.hidden_size, order=orders[1]),
            k_norm=LayerNorm(norm[0], _INNER_EPS, norm[1]),
            weights_proj=weights.linear(f"{path}.weights_proj", heads, config.hidden_size),
            num_heads=heads,
            rope=self.rope(spec, width),
            scale=(heads * width) ** -0.5,
        )
        return RankedAttention(indexer, **parts)


def _yarn_scale(fields: Fields, rope: RopeSpec | None) -> float:
    """The factor of YaRN on all scores; 1 unless the config states `mscale_all_dim`."""
    stated = fields.fields("rope_parameters", "rope_scaling")
    if rope is None or rope.kind != "yarn" or stated is None:
        return 1.0
    all_dims = stated.number("mscale_all_dim", low=0.0, high=1e3, default=0.0)
    return yarn_magnitude(rope.factor, all_dims) ** 2 if all_dims else 1.0


def with_experts(config: ModelConfig) -> ModelConfig:
    """The config with the experts' fields of DeepSeek and related families, if there are any."""
    fields = config.fields
    if fields.get("n_routed_experts", "num_local_experts") is None:
        return replace(config, sparse_layers=(False,) * config.num_layers)
    num_experts = fields.integer("n_routed_experts", "num_local_experts", high=2**16)
    return replace(
        config,
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", high=num_experts),
        moe_intermediate_size=fields.integer("moe_intermediate_size", high=2**22),
        norm_topk_prob=fields.boolean("norm_topk_prob"),
        sparse_layers=sparse_layers(fields, config.num_layers),
    )


def sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it has experts: as listed; else all but the first have them."""
    keys, known = ("mlp_layer_types", "is_moe_layer"), ("dense", "sparse", False, True)
    stated = fields.by_layer(*keys, count=num_layers, known=known)
    if stated is None:
        dense = fields.integer("first_k_dense_replace", low=0)
        return tuple(i >= dense for i in range(num_layers))
    return tuple(kind in ("sparse", True) for kind in stated)


def expert_groups(config: ModelConfig, counted: int = 1) -> tuple[int, int]:
    """How many groups experts stand in, and of how many the best experts are taken.

    Args:
        counted: experts of a group that say how good it is.

    Raises:
        CheckpointError: no such groups can be made, or they have too few experts for a token.
    """
    fields, count = config.fields, config.num_experts
    groups, best = fields.integer("n_group"), fields.integer("topk_group")
    in_best, chosen = best * count // groups, config.experts_per_token
    if best < groups and (count % groups or count < counted * groups or in_best < chosen):
        raise CheckpointError(
            f"n_group in {fields.where} is {groups} and topk_group {best}, for {count} experts of "
            f"which a token gets {chosen}; expected equal groups, and enough experts in the best."
        )
    return groups, best


def biased_routing(family: Family, path: str) -> ExpertChoice:
    """Sigmoid scores. Groups and experts are chosen by score plus bias. A factor of null is 1."""
    config, fields = family.config, family.config.fields
    bias = family.weights.raw(f"{path}.gate.e_score_correction_bias", (config.num_experts,))
    num_groups, num_best = expert_groups(config, counted=2)
    routing = Routing(
        config.experts_per_token,
        sigmoid=True,
        normalised=config.norm_topk_prob,
        biased=True,
        eps=SUM_EPS,
        factor=fields.number("routed_scaling_factor", default=1.0),
        num_groups=num_groups,
        num_best=num_best,
        counted=2,
    )
    return ExpertChoice(routing, bias.astype(mx.float32))


def shared_expert(family: Family, path: str) -> FeedForward | None:
    """The experts that every token goes to, as one wide MLP; None: there are none."""
    keys = "n_shared_experts", "moe_num_shared_experts"
    count = family.config.fields.integer(*keys, low=0, high=2**10, default=0)
    if not count:
        return None
    return family.dense_mlp(f"{path}.shared_experts", family.config.moe_intermediate_size * count)
