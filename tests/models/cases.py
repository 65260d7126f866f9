"""Tiny configurations of every native family, as the hub spells them. Knows no mlx and no torch.

Chosen to tell right from nearly right: kv heads != heads, head_dim != hidden / heads, windows
shorter than the text, contexts that cross `original_max_position_embeddings`, at least two periods
of each layer pattern, tied and untied, the spellings of transformers 4 ("v4") and 5 ("v5").
"""

from typing import Any

WINDOW = 8

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
_MOE = {
    **_SMALL,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_GEMMA = {
    **_SMALL,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": [2, 5],
}
_OSS = {
    **_SMALL,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "sliding_window": WINDOW,
    "swiglu_limit": 7.0,
}
_OSS_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_type": "yarn",
    "truncate": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_THIRDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2

CASES: dict[str, dict[str, Any]] = {
    "llama-v4": {
        **_SMALL,
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": _LLAMA3,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    "llama-v5": {
        **_SMALL,
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    "mistral-v4": {
        **_SMALL,
        "model_type": "mistral",
        "rope_theta": 1000.0,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    "mistral-v5": {
        **_SMALL,
        "model_type": "mistral",
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        "tie_word_embeddings": True,
    },
    "qwen2-v4": {
        **{key: value for key, value in _SMALL.items() if key != "head_dim"},
        "model_type": "qwen2",
        "num_key_value_heads": 1,
        "rope_theta": 4.0,  # so slow a spread that YaRN's range ends past the last pair
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "use_sliding_window": False,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
    "qwen2-v5": {
        **{key: value for key, value in _SMALL.items() if key != "head_dim"},
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
    },
    "qwen3-v4": {
        **_SMALL,
        "model_type": "qwen3",
        "rope_theta": 1000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen3-v5": {
        **_SMALL,
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "tie_word_embeddings": False,
    },
    "qwen3_moe-v4": {
        **_MOE,
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "rope_theta": 1000.0,
        "tie_word_embeddings": False,
    },
    "qwen3_moe-v5": {
        **_MOE,
        "model_type": "qwen3_moe",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": True,
    },
    "gemma3_text-v4": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "sliding_window_pattern": 3,
        "rope_theta": 2000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "gemma3_text-v5": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "layer_types": _THIRDS,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gpt_oss-v4": {
        **_OSS,
        "model_type": "gpt_oss",
        "layer_types": _ALTERNATING,
        "rope_theta": 150000,
        "rope_scaling": _OSS_YARN,
        "experts_per_token": 2,
        "tie_word_embeddings": False,
    },
    "gpt_oss-v5": {
        **_OSS,
        "model_type": "gpt_oss",
        "layer_types": _ALTERNATING,
        "rope_parameters": {**_OSS_YARN, "truncate": True, "rope_theta": 1000.0},
        "swiglu_limit": 1.5,
        "tie_word_embeddings": False,
    },
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with this config, by its name on the hub."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings", config["model_type"] == "gemma3_text"):
        table["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        table |= {f"{path}.{name}.weight": (hidden,) for name in _norms(config)}
        table |= {f"{path}.self_attn.{name}": s for name, s in _attention(config).items()}
        table |= {f"{path}.mlp.{name}": s for name, s in _mlp(config, layer).items()}
    return table


def _norms(config: dict[str, Any]) -> list[str]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return names


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    family, hidden, heads = (
        config["model_type"],
        config["hidden_size"],
        config["num_attention_heads"],
    )
    dim = config.get("head_dim", hidden // heads)
    kv = config["num_key_value_heads"] * dim
    rows = {"q_proj": heads * dim, "k_proj": kv, "v_proj": kv}
    table: dict[str, tuple[int, ...]] = {f"{n}.weight": (r, hidden) for n, r in rows.items()}
    table["o_proj.weight"] = (hidden, heads * dim)
    if config.get("attention_bias") or family == "qwen2":
        table |= {f"{name}.bias": (r,) for name, r in rows.items()}
    if config.get("attention_bias"):
        table["o_proj.bias"] = (hidden,)
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        table |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    if family == "gpt_oss":
        table["sinks"] = (heads,)
    return table


def _mlp(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config.get("num_experts", config.get("num_local_experts", 0))
    if config["model_type"] == "gpt_oss":
        return {
            "router.weight": (experts, hidden),
            "router.bias": (experts,),
            "experts.gate_up_proj": (experts, hidden, 2 * inner),
            "experts.gate_up_proj_bias": (experts, 2 * inner),
            "experts.down_proj": (experts, inner, hidden),
            "experts.down_proj_bias": (experts, hidden),
        }
    sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    if experts and sparse and layer not in config["mlp_only_layers"]:
        table: dict[str, tuple[int, ...]] = {"gate.weight": (experts, hidden)}
        for expert in range(experts):
            table |= _gated(f"experts.{expert}.", hidden, config["moe_intermediate_size"], False)
        return table
    return _gated("", hidden, inner, config.get("mlp_bias", False))


def _gated(prefix: str, hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    rows = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    table: dict[str, tuple[int, ...]] = {f"{prefix}{n}.weight": s for n, s in rows.items()}
    if bias:
        table |= {f"{prefix}{name}.bias": shape[:1] for name, shape in rows.items()}
    return table
