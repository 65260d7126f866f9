"""GLM 4 and 5: the dense models, GLM 4.5 to 4.7 with experts, GLM 4.7 Flash, GLM 5, Solar Open."""

from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.latent_attention import LatentAttention, RankedAttention
from ...layers.mlp import FeedForward
from ..config import ModelConfig
from ..family import Family, HeadNorms, MTPForm, pairs_apart
from ..jsonfields import Fields
from ..stage import BetweenStages
from .deepseek import PLAIN_ROUTING, DeepseekV3, DeepseekV32, V3Experts


class Glm(Family):
    """GLM 4 of 2024: half of each head rotates, gate and up are one tensor in the checkpoint."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
    }
    biases = ("attention_bias", None)
    ignored = ("sliding_window",)
    head_order = pairs_apart

    def mlp(self, index: int) -> FeedForward:
        return self.packed_mlp(f"model.layers.{index}.mlp", self.config.intermediate_size)


class Glm4(Glm):
    """The dense models of 2025: norms after both blocks too."""

    block_norms = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class Glm4V(Glm4):
    """The text of GLM 4.1V and 4.6V Flash, where configs leave out less usual values."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    }


class GlmOcr(Glm4V):
    """The text of GLM-OCR: no biases, and whole heads rotate."""

    defaults: ClassVar = {
        **Glm4V.defaults,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 131_072,
    }


class Glm4MoE(V3Experts):
    """Pre-norm layers, QK-norm where stated, DeepSeek V3's experts."""

    ignored = ("sliding_window",)
    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    }
    mtp = MTPForm()
    head_norms = HeadNorms()
    biases = ("attention_bias", None)

    def head_norm_weight(self, index: int) -> mx.array | None:
        stated = self.config.fields.boolean("use_qk_norm")
        return super().head_norm_weight(index) if stated else None


class SolarOpen(Glm4MoE):
    """Solar Open 100B: whole heads rotate, and every layer has experts."""

    defaults: ClassVar = {
        **Glm4MoE.defaults,
        "num_attention_heads": 64,
        "head_dim": 128,
        "intermediate_size": 10_240,  # of dense layers, which there are none of
        "partial_rotary_factor": 1.0,
        "rope_theta": 1_000_000.0,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
    }


class Glm4MoELite(DeepseekV3):
    """GLM 4.7 Flash: DeepSeek V3's attention and experts."""

    defaults: ClassVar = {
        **PLAIN_ROUTING,
        "num_attention_heads": 20,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
    }


class GlmMoeDsa(DeepseekV32, Glm4MoELite):
    """GLM 5: as GLM 4.7 Flash, with the indexers of DeepSeek V3.2, which rotate neighbours.

    From GLM 5.2 on some layers see the tokens that an earlier layer's indexer chose (IndexShare,
    arXiv 2603.12201). The layer that predicts further ahead has an indexer always.
    """

    defaults: ClassVar = {
        **Glm4MoELite.defaults,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
    }

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        shared = _shared_indexers(config.fields)
        flags = tuple(index in shared for index in range(config.num_layers))
        return replace(super().configure(config), without_index=flags)

    @classmethod
    def between_stages(cls, config: ModelConfig) -> BetweenStages:
        return BetweenStages((config.hidden_size,), bound=_shared_indexers(config.fields))

    def attention(self, index: int, **parts: Any) -> LatentAttention:
        """With an indexer of its own, or the choice of an earlier one.

        Checkpoints may hold indexers that nothing uses; those are left out.
        """
        if self.config.without_index[index : index + 1] != (True,):
            return super().attention(index, **parts)
        self.weights.drop_below([f"model.layers.{index}.self_attn.indexer."])
        return RankedAttention(None, **parts)


def _shared_indexers(fields: Fields) -> frozenset[int]:
    kinds = indexer_kinds(fields)
    if kinds[0] != "full":
        raise CheckpointError(
            f"indexer_types or index_topk_pattern in {fields.where} must begin with a 'full' layer."
        )
    return frozenset(index for index, kind in enumerate(kinds) if kind == "shared")


def indexer_kinds(fields: Fields) -> list[str]:
    """'full' or 'shared' for each layer, whether it has an indexer of its own.

    As listed; else by a pattern of letters; else every `index_topk_freq`-th layer has an indexer.
    """
    count = fields.integer("num_hidden_layers", high=2**16)
    key, known = "index_topk_pattern", {"F": "full", "S": "shared"}
    kinds = fields.by_layer("indexer_types", count=count, known=("full", "shared"))
    if kinds is None and (pattern := fields.text(key, default="")):
        letters = Fields({key: [*pattern]}, fields.where).by_layer(key, count=count, known="FS")
        kinds = [known[letter] for letter in letters or ()]
    if kinds is None:
        period = fields.integer("index_topk_freq", low=0, high=2**16, default=1) or 1
        offset = fields.integer("index_skip_topk_offset", low=0, high=2**16, default=2)
        late = [max(index - offset + 1, 0) % period for index in range(count)]
        kinds = ["shared" if more else "full" for more in late]
    return kinds
