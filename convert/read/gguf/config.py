"""GGUF metadata -> config.json as transformers writes it. Knows no tensors beyond their shapes.

What llama.cpp keeps in its code and not in its files stands here: Gemma 3's period of six layers
and local frequency, gpt-oss's alternation and limits, Qwen 3's normalised expert weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....models.jsonfields import Fields
from ..stored import Array
from .facts import Facts
from .rope import check_rope_dims, rope_scaling

_MAX_LAYERS = 2000
_KINDS = ("sliding_attention", "full_attention")
_GEMMA3_27B = 62  # layers; llama.cpp tells it by them, and scales by hidden / heads


def make_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Array | None,
    label: str,
) -> dict[str, Any]:
    """config.json for a GGUF file.

    Args:
        shapes: of the tensors, by the names of transformers.
        rope_factors: the tensor that llama.cpp makes of Llama 3's scaling, float32.

    Raises:
        CheckpointError: a key is missing or out of range.
        UnsupportedModelError: a feature that the family has not here.
    """
    facts = Facts(metadata, label)
    family = _FAMILIES[facts.architecture]
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    head_dim = facts.integer("attention.key_length", max(hidden // heads, 1))
    table = shapes.get("model.embed_tokens.weight")
    if table is None or len(table) != 2 or table[1] != hidden:
        raise CheckpointError(f"{label} has no token_embd.weight of {hidden} columns.")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": facts.all.integer(
            f"{facts.architecture}.block_count", high=_MAX_LAYERS
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": table[0],
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": facts.integer("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(facts, rope_factors, head_dim),
        **_token_ids(facts.all),
    }
    check_rope_dims(facts, head_dim)
    return config | family(facts, shapes, config)


def _llama(
    facts: Facts, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    """Mistral's files call themselves llama; only a window sets them apart."""
    if facts.has("expert_count") and facts.all.integer("llama.expert_count", low=0):
        raise UnsupportedModelError(
            f"{facts.all.where} is a mixture of experts of the llama architecture (Mixtral); "
            "not supported."
        )
    biased = "model.layers.0.self_attn.q_proj.bias" in shapes
    if facts.has("attention.sliding_window"):
        own = {"sliding_window": facts.integer("attention.sliding_window")}
        return _family("mistral", "MistralForCausalLM", facts) | own
    return _family("llama", "LlamaForCausalLM", facts) | {"attention_bias": biased}


def _qwen2(
    facts: Facts, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    return _family("qwen2", "Qwen2ForCausalLM", facts) | {"use_sliding_window": False}


def _qwen3(
    facts: Facts, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    own = {"use_sliding_window": False, "attention_bias": False}
    return _family("qwen3", "Qwen3ForCausalLM", facts) | own


def _qwen3_moe(
    facts: Facts, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    return _family("qwen3_moe", "Qwen3MoeForCausalLM", facts) | {
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "num_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gemma3(
    facts: Facts, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    large = config["num_hidden_layers"] == _GEMMA3_27B
    per_head = config["hidden_size"] // config["num_attention_heads"]
    own = _family("gemma3_text", "Gemma3ForCausalLM", facts)
    del own["hidden_act"]
    return own | {
        **_gemma3_layers(facts, config["num_hidden_layers"]),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if large else config["head_dim"],
        "sliding_window": facts.integer("attention.sliding_window"),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def _gemma3_layers(facts: Facts, num_layers: int) -> dict[str, Any]:
    """Newer files may say of each layer whether it slides."""
    slides = facts.all.get("gemma3.attention.sliding_window_pattern")
    if not isinstance(slides, np.ndarray):
        return {"sliding_window_pattern": facts.integer("attention.sliding_window_pattern", 6)}
    if slides.dtype.kind not in "biu" or slides.shape != (num_layers,):
        raise CheckpointError(
            f"sliding_window_pattern in {facts.all.where} is not one flag for each layer."
        )
    return {"layer_types": [_KINDS[0] if flag else _KINDS[1] for flag in slides]}


def _gpt_oss(
    facts: Facts, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    per_token = facts.integer("expert_used_count")
    scaling = config["rope_scaling"]
    return _family("gpt_oss", "GptOssForCausalLM", facts) | {
        "intermediate_size": facts.integer("expert_feed_forward_length"),
        "num_local_experts": facts.integer("expert_count"),
        "num_experts_per_tok": per_token,
        "experts_per_token": per_token,
        "attention_bias": True,
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": [_KINDS[index % 2] for index in range(config["num_hidden_layers"])],
        "swiglu_limit": 7.0,
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


_Family = Callable[[Facts, Mapping[str, tuple[int, ...]], dict[str, Any]], dict[str, Any]]
_FAMILIES: dict[str, _Family] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}


def _family(model_type: str, architecture: str, facts: Facts) -> dict[str, Any]:
    sparse = model_type in ("qwen3_moe", "gpt_oss")
    length = (
        facts.integer("feed_forward_length", 1) if sparse else facts.integer("feed_forward_length")
    )
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "intermediate_size": length,
        "hidden_act": "silu",
    }


def _token_ids(metadata: Fields) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    names = {key: f"tokenizer.ggml.{name}_token_id" for key, name in keys.items()}
    return {
        key: metadata.integer(name, low=0)
        for key, name in names.items()
        if metadata.get(name) is not None
    }
