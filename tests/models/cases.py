"""Tiny configurations of every native family, as the hub spells them. No mlx, no torch.

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
_NO_HEAD_DIM = {key: value for key, value in _SMALL.items() if key != "head_dim"}
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

_GRANITE = {
    "model_type": "granite",
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}
_DEEPSEEK = {
    **{
        key: value
        for key, value in _SMALL.items()
        if key not in ("head_dim", "num_key_value_heads")
    },
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}
_DEEPSEEK_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}


def _long_factors(pairs: int) -> dict[str, list[float]]:
    return {
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [1.2 + 0.7 * i for i in range(pairs)],
    }


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
        **_NO_HEAD_DIM,
        "model_type": "qwen2",
        "num_key_value_heads": 1,
        "rope_theta": 4.0,  # so slow a spread that YaRN's range ends past the last pair
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "use_sliding_window": False,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
    "qwen2-v5": {
        **_NO_HEAD_DIM,
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
    "olmo2-v4": {
        **_SMALL,
        "model_type": "olmo2",
        "rope_theta": 1000.0,
        "tie_word_embeddings": False,
    },
    "olmo2-v5": {
        **_SMALL,
        "model_type": "olmo2",
        "num_key_value_heads": 1,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        "tie_word_embeddings": True,
    },
    "phi3-v4": {  # the text outgrows the original context: long factors
        **_NO_HEAD_DIM,
        "model_type": "phi3",
        "pad_token_id": None,
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "longrope", **_long_factors(8)},
        "original_max_position_embeddings": 16,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "phi3-v5": {  # and here it does not: short factors
        **_NO_HEAD_DIM,
        "model_type": "phi3",
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            **_long_factors(6),
        },
        "original_max_position_embeddings": 64,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    "granite-v4": {
        **_SMALL,
        **_GRANITE,
        "rope_theta": 1000.0,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "granite-v5": {
        **_SMALL,
        **_GRANITE,
        "attention_multiplier": 0.4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "tie_word_embeddings": False,
    },
    "deepseek_v2-v4": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_theta": 1000.0,
        "rope_scaling": {
            **_DEEPSEEK_YARN,
            "type": "yarn",
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
    "deepseek_v2-v5": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "q_lora_rank": 28,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "tie_word_embeddings": True,
    },
    "deepseek_v3-v4": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "kv_lora_rank": 32,  # sizes that can be quantised
        "q_lora_rank": 28,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 1000.0,
        "rope_scaling": {**_DEEPSEEK_YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.6},
        "tie_word_embeddings": False,
    },
    "deepseek_v3-v5": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "rope_parameters": {
            **_DEEPSEEK_YARN,
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": True,
    },
}
