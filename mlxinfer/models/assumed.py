"""What a family assumes where its config is silent, as transformers has it. No mlx."""

from collections.abc import Mapping
from typing import Any

from .jsonfields import Fields

_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ASSUMED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"head_dim": 128, "sliding_window": 4096},
    "qwen3_moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "sliding_window": 4096,
    },
    "gemma3_text": _GEMMA3,
    "gpt_oss": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150_000.0,
        "rope_scaling": _GPT_OSS_ROPE,
        "experts_per_token": 4,
    },
}
_COMMON = {
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}


def text_fields(raw: Mapping[str, Any]) -> Fields:
    """The object that describes the language model, with the family's assumptions filled in."""
    top = Fields(raw, "config.json")
    model_type = top.text("model_type")
    text = top.fields("text_config")
    if model_type == "gemma3" and text is not None:
        top = Fields({"model_type": "gemma3_text", **text.values}, text.where)
        model_type = top.text("model_type")
    elif model_type == "gemma3":
        model_type = "gemma3_text"
        top = Fields({**raw, "model_type": model_type}, top.where)
    assumed = {**_COMMON, **_ASSUMED.get(model_type, {})}
    if top.get("rope_parameters") is not None:
        assumed.pop("rope_scaling", None)
    return Fields({**assumed, **top.values}, top.where)
