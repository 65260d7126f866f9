"""A config.json that mlx-lm reads as we do. Knows spellings, no tensors and no files.

mlx-lm reads what transformers 4 wrote; where a key is missing it takes a default of its own and
answers nonsense. So transformers 5's keys are there in the old spelling, too, and what a family
assumes here is spelled out.
"""

from collections.abc import Mapping
from typing import Any

from ..models.config import ModelConfig

_GEMMA3 = (  # whose defaults are others in mlx-lm
    *("num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar"),
    *("sliding_window", "rope_theta", "rope_local_base_freq", "max_position_embeddings"),
    *("rms_norm_eps", "hidden_activation"),
)


def spelled_out(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """A config with what is missing in the old spelling; what the source says stays.

    Args:
        config: contents of config.json, with or without a text_config.
        model: what it means.
    """
    top = _old_spelling(config)
    inner = language_config(config)
    text = top if inner is None else _old_spelling(inner)
    if model.model_type == "gemma3_text":
        _spell_gemma3(text, model)
    if model.model_type == "gpt_oss":
        _fill(text, "rope_scaling", model.fields.get("rope_scaling"))
    _spell_silent(text, model)
    if text is top:
        top["model_type"] = model.model_type
    else:
        top |= {"text_config": text, "vocab_size": model.vocab_size}
    if not model.tie_word_embeddings:
        top["tie_word_embeddings"] = False
    return top


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a multimodal model's config that is about language; None: all of it is."""
    inner = config.get("text_config")
    return inner if config.get("model_type") == "gemma3" and isinstance(inner, Mapping) else None


def _old_spelling(stated: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(stated)
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
        if isinstance(full, Mapping):
            _fill(config, "rope_theta", full.get("rope_theta"))
            if full.get("rope_type", "default") != "default":
                scaling = {key: value for key, value in full.items() if key != "rope_theta"}
                _fill(config, "rope_scaling", scaling)
        if isinstance(local, Mapping):
            _fill(config, "rope_local_base_freq", local.get("rope_theta"))
    _fill(config, "torch_dtype", config.get("dtype"))
    return config


def _spell_gemma3(config: dict[str, Any], model: ModelConfig) -> None:
    """What mlx-lm assumes otherwise, and the period of layers that see everything."""
    for key in _GEMMA3:
        _fill(config, key, model.fields.get(key))
    period = next((i + 1 for i, window in enumerate(model.windows) if window is None), 0)
    full = [window is None for window in model.windows]
    if period and full == [not (i + 1) % period for i in range(len(full))]:
        config["sliding_window_pattern"] = period


def _spell_silent(config: dict[str, Any], model: ModelConfig) -> None:
    """What families assume here where a config is silent: mlx-lm refuses or assumes otherwise."""
    ropes = zip(model.ropes, model.windows, strict=True)
    rope = next((rope for rope, window in ropes if window is None), model.ropes[0])
    found: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": rope.theta,
        "max_position_embeddings": model.fields.get("max_position_embeddings"),
    }
    if model.num_experts:
        own = "num_local_experts" if model.model_type == "gpt_oss" else "num_experts"
        found |= {own: model.num_experts, "num_experts_per_tok": model.experts_per_token}
    if model.model_type == "qwen3_moe":
        found |= {
            "moe_intermediate_size": model.moe_intermediate_size,
            "norm_topk_prob": model.norm_topk_prob,
            "decoder_sparse_step": model.fields.get("decoder_sparse_step") or 1,
            "mlp_only_layers": model.fields.get("mlp_only_layers") or [],
        }
    for key, value in found.items():
        _fill(config, key, value)


def _fill(config: dict[str, Any], key: str, value: Any) -> None:
    if config.get(key) is None and value is not None:
        config[key] = value
