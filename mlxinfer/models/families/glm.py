"""GLM 4 and 5: the dense models, GLM 4.5 to 4.7 with experts, GLM 4.7 Flash, GLM 5, Solar Open."""

from typing import ClassVar

from ...errors import UnsupportedModelError
from ...layers.mlp import FeedForward
from ...layers.step import Layer
from ..config import ModelConfig
from ..decoder import ResidualLayer
from ..family import Family
from ..jsonfields import Fields
from .deepseek import DeepseekV3, DeepseekV32, biased_routing, shared_expert, with_experts

_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


class Glm(Family):
    """GLM 4 of 2024: half of each head turns, gate and up are one tensor in the checkpoint."""

    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
    }
    interleaved = True

    @classmethod
    def biases(cls, fields: Fields) -> tuple[bool, bool]:
        """Never on the output."""
        return fields.boolean("attention_bias"), False

    def mlp(self, index: int) -> FeedForward:
        """gate_up_proj, the gate first, and down_proj."""
        return self.packed_mlp(f"model.layers.{index}.mlp", self.config.intermediate_size)


class Glm4(Glm):
    """The dense models of 2025: norms after both blocks too."""

    def layer(self, index: int) -> Layer:
        """Norms before and after both blocks."""
        norms = [self.norm(f"model.layers.{index}.{name}") for name in _NORMS]
        blocks = self.mixer(index), self.mlp(index)
        return ResidualLayer(*blocks, before=norms[::2], after=norms[1::2])


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
    """The text of GLM-OCR: no biases, and whole heads turn."""

    defaults: ClassVar = {
        **Glm4V.defaults,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 131_072,
    }


class Glm4MoE(Family):
    """Pre-norm layers, QK-norm where stated, DeepSeek V3's experts."""

    defaults: ClassVar = {
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
    }
    dense_matrices = (".mlp.gate",)

    @classmethod
    def biases(cls, fields: Fields) -> tuple[bool, bool]:
        """Never on the output."""
        return fields.boolean("attention_bias", default=False), False

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """Set the layers that have experts."""
        return with_experts(config)

    def has_head_norms(self) -> bool:
        """As stated."""
        return self.config.fields.boolean("use_qk_norm")

    def mlp(self, index: int) -> FeedForward:
        """An MLP in the first layers, then experts and shared experts."""
        path = f"model.layers.{index}.mlp"
        if not self.config.sparse_layers[index]:
            return super().mlp(index)
        return self.experts(path, biased_routing(self, path), shared=shared_expert(self, path))


class SolarOpen(Glm4MoE):
    """Solar Open 100B: whole heads turn, and every layer has experts."""

    defaults: ClassVar = {
        **Glm4MoE.defaults,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
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
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
    }


class GlmMoeDsa(DeepseekV32, Glm4MoELite):
    """GLM 5: as GLM 4.7 Flash, with the indexers of DeepSeek V3.2, which turn neighbours."""

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
        """Refuse layers that reuse the choice of an earlier layer's indexer."""
        fields = config.fields
        types = {str(kind) for kind in fields.items("indexer_types") or ()}
        pattern = str(fields.get("index_topk_pattern") or "")
        often = fields.integer("index_topk_freq", high=2**16, default=1)
        if types - {"full"} or "S" in pattern or often > 1:
            raise UnsupportedModelError(
                f"In {fields.where} some layers see the tokens that an earlier layer's indexer "
                "chose (indexer_types, index_topk_pattern or index_topk_freq); models where all "
                "layers have indexers run."
            )
        return super().configure(config)
