"""Configs and tensors in the spelling that mlx-lm's definitions read.

transformers 5 writes some keys under other names than the vendors did, and vendors other names of
tensors than mlx-lm expects. No mlx.
"""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# model_type -> a key that mlx-lm reads, and the one that is read where a config lacks it.
OTHER_KEYS: Mapping[str, Mapping[str, str]] = {
    "exaone": {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"},
    "gpt2": {"n_ctx": "n_positions"},
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
}
# model_type -> values of keys that a config may leave out.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "gpt_neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.25},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "zero_expert_type": "identity",
    },
}
# model_type -> parts of names of tensors, and mlx-lm's.
TENSORS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"transformer.": ""},
    "nanochat": {
        "model.embed_tokens.": "transformer.wte.",
        "model.layers.": "transformer.h.",
        ".self_attn.o_proj.": ".attn.c_proj.",
        **{f".self_attn.{part}_proj.": f".attn.c_{part}." for part in "qkv"},
        ".mlp.fc1.": ".mlp.c_fc.",
        ".mlp.fc2.": ".mlp.c_proj.",
    },
}


def classes_of(config: Mapping[str, Any]) -> list[Any]:
    """The vendor's names of the model's class, by which mlx-lm tells some designs apart."""
    stated = config.get("architectures")
    return list(stated) if isinstance(stated, list) else []


def tensors_respelled(model_type: str, tensors: Mapping[str, T]) -> dict[str, T]:
    out: dict[str, T] = {}
    for name, tensor in tensors.items():
        for part, theirs in TENSORS.get(model_type, {}).items():
            name = name.replace(part, theirs)
        out[name] = tensor
    return out


def respelled(args_type: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the spelling that mlx-lm reads, for a ModelArgs that ignores what it lacks.

    transformers 5 writes `rope_parameters`, which holds the theta, the kind of scaling and the part
    of a head that rotates; before, each was a key of its own.
    """
    known = inspect.signature(args_type).parameters
    out = {key: _respelled_inner(value) for key, value in config.items()}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_parameters" not in known:
        out = _with_old_rope(out, rope)
    return _with_their_keys(out)


def _with_their_keys(config: dict[str, Any]) -> dict[str, Any]:
    model_type = str(config.get("model_type"))
    for key, other in OTHER_KEYS.get(model_type, {}).items():
        if config.get(key) is None and config.get(other) is not None:
            config[key] = config[other]
    for key, value in DEFAULTS.get(model_type, {}).items():
        config.setdefault(key, value)
    if model_type == "gpt_bigcode" and config.get("n_inner") is None:
        config["n_inner"] = 4 * config["n_embd"]
    if model_type == "mamba2":
        config.setdefault("intermediate_size", config["num_heads"] * config["head_dim"])
    return config


def _respelled_inner(value: Any) -> Any:
    """The config of a language model inside another; definitions read some keys of either kind."""
    if not isinstance(value, dict) or not isinstance(value.get("rope_parameters"), dict):
        return value
    return _with_old_rope(value, value["rope_parameters"])


def _with_old_rope(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Copy the fields of `rope_parameters` to the older keys, unless those are stated."""
    if "full_attention" in rope and isinstance(rope["full_attention"], dict):
        rope = rope["full_attention"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    old: dict[str, Any] = {
        key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope
    }
    if kind != "default":
        old["rope_scaling"] = {**rope, "rope_type": kind, "type": kind}
    silent = {key: value for key, value in old.items() if config.get(key) is None}
    return {**config, **silent}
