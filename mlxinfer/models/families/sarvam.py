"""Sarvam 105B and 30B: DeepSeek V3 and GLM 4.5, with configs and tensors under other names."""

from typing import ClassVar

from ..jsonfields import Fields
from .bailing import BailingHybrid
from .biased_experts import V3_KEYS
from .deepseek import DeepseekV3
from .glm import Glm4MoE
from .llama import Phi3

_NAMES = {  # of the hub, and ours
    **BailingHybrid.names,
    ".query_key_value.": ".qkv_proj.",
    ".query_layernorm.": ".q_norm.",
    ".key_layernorm.": ".k_norm.",
}


class SarvamMLA(DeepseekV3):
    """Sarvam 105B."""

    defaults: ClassVar = {
        **DeepseekV3.defaults,
        "num_attention_heads": 64,
        "q_lora_rank": None,
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    keys = V3_KEYS


class SarvamMoE(Glm4MoE):
    """Sarvam 30B: whole heads rotate, Q, K and V are one tensor."""

    defaults: ClassVar = {
        **Glm4MoE.defaults,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "partial_rotary_factor": 1.0,
        "rope_theta": 8_000_000.0,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    }
    keys = V3_KEYS
    names = _NAMES
    qkv = Phi3.qkv

    @classmethod
    def language_model(cls, config: Fields) -> Fields:
        bias = config.get("use_qkv_bias", "attention_bias")
        values = {**config.values, "attention_bias": False if bias is None else bias}
        return super().language_model(Fields(values, config.where))
