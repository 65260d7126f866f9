"""Ministral 3 and Mistral 4: queries that grow with their position, over Mistral and DeepSeek."""

from dataclasses import replace
from typing import Any, ClassVar

from ...errors import CheckpointError
from ...layers.attention import AttentionArgs
from ...layers.latent_attention import LatentAttention
from ...layers.moe import ExpertChoice
from ...layers.rope import QueryScale
from ...metal_kernels.routing import SUM_EPS, Routing
from ..jsonfields import Fields
from .deepseek import PLAIN_ROUTING, DeepseekV3, expert_groups
from .llama import Mistral, whole_heads


class Ministral3(Mistral):
    """Ministral 3: YaRN, windows where the config states them."""

    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
    }

    def attention_args(self, index: int) -> AttentionArgs:
        """`llama_4_scaling_beta` for each of the original contexts that came before."""
        scale = _query_scale(self.config.fields)
        return replace(super().attention_args(index), query_scale=scale)


class Mistral4(DeepseekV3):
    """Mistral Small 4: latent attention; a softmax router."""

    defaults: ClassVar = {
        "num_attention_heads": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        **PLAIN_ROUTING,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 1_048_576,
    }

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        """Without the part of heads that rotates, which `qk_rope_head_dim` states."""
        return whole_heads(config)

    def attention(self, index: int, **parts: Any) -> LatentAttention:
        return super().attention(index, **parts, query_scale=_query_scale(self.config.fields))

    def routing(self, path: str) -> ExpertChoice:
        """Scores of a softmax; groups by their two best experts."""
        fields = self.config.fields
        num_groups, num_best = expert_groups(self.config, counted=2)
        routing = Routing(
            self.config.experts_per_token,
            normalised=self.config.norm_topk_prob,
            eps=SUM_EPS,
            factor=fields.number("routed_scaling_factor"),
            num_groups=num_groups,
            num_best=num_best,
            counted=2,
        )
        return ExpertChoice(routing)


def _query_scale(fields: Fields) -> QueryScale:
    stated = fields.fields("rope_parameters", "rope_scaling")
    if stated is None:
        raise CheckpointError(f"{fields.where} has no rope_parameters, which this model needs.")
    return QueryScale(
        stated.number("llama_4_scaling_beta", low=0.0, high=1e3),
        stated.integer("original_max_position_embeddings"),
    )
