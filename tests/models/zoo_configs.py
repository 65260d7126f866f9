"""Small configs of every architecture that mlx-lm defines, derived from its ModelArgs.

A field gets the small value that its name has in SIZES; fields without one keep their defaults.
What these do not settle, such as lists with an entry for each layer, stands in OVERRIDES.
"""

import dataclasses
from types import ModuleType
from typing import Any

LAYERS = 4
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
ROPES = {"sliding_attention": ROPE, "full_attention": ROPE}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 128),
    **dict.fromkeys(
        ("hidden_size", "hidden_dim", "d_model", "n_embd", "model_dim", "dim", "dim_model_base"), 64
    ),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp"), 128),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers"), LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "kv_channels"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), 512
    ),
    **dict.fromkeys(
        (
            *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
            *("layernorm_epsilon", "post_norm_eps"),
        ),
        1e-5,
    ),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "swa_rope_theta"), 10000.0),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "index_topk", "sliding_window"), 8),
    **dict.fromkeys(("sliding_window_size", "attention_window_size", "window_size"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        (
            *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
            *("moe_top_k", "top_k_experts"),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"),
            *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
            *("share_expert_dim", "kv_lora_rank", "q_lora_rank", "moe_hidden_size"),
        ),
        32,
    ),
    **dict.fromkeys(
        (
            *("n_shared_experts", "num_shared_experts", "num_shared_expert", "n_group"),
            *("topk_group", "num_expert_group", "first_k_dense_replace", "moe_layer_freq"),
            *("decoder_sparse_step", "num_dense_layers", "n_groups", "mamba_n_groups"),
        ),
        1,
    ),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm", "qk_norm", "use_conv_bias"), True),
    **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora", "use_expert_bias"), True),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_bias"), False),
    **dict.fromkeys(("use_qkv_bias", "mamba_proj_bias", "conv_bias", "post_norm"), False),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv1d_width"), 4),
    **dict.fromkeys(("time_step_rank", "conv_L_cache", "conv_window"), 4),
    **dict.fromkeys(("mamba_expand", "index_n_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("layer_group_size", "group_norm_size", "dense_attention_every_n_layers"), 2),
    **dict.fromkeys(("logits_scaling", "embedding_multiplier", "residual_multiplier"), 1.0),
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_allow_neg_eigval": True,
    "mamba_d_ssm": 128,
    "mamba_conv_bias": True,
    "attention_multiplier": 0.25,
    "mlp_only_layers": [],
    "routed_scaling_factor": 1.0,
    "scale_emb": 1.0,
    "scale_depth": 1.4,
    "time_step_limit": [0.0, 100.0],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "logits_soft_cap": 30.0,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
}

TEXT = {  # of a language model inside a multimodal one
    "model_type": "llama",
    **{
        key: SIZES[key]
        for key in (
            *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
            *("rope_theta", "max_position_embeddings", "tie_word_embeddings"),
        )
    },
}
DEEPSEEK = {
    **TEXT,
    "model_type": "deepseek_v3",
    **{
        key: SIZES[key]
        for key in (
            *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"),
            *("n_shared_experts", "topk_group", "first_k_dense_replace", "kv_lora_rank"),
            *("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "topk_method"),
            *("scoring_func", "norm_topk_prob", "routed_scaling_factor", "moe_layer_freq"),
        )
    },
    "num_key_value_heads": 4,
}
KDA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
MAMBA_PATTERN = "M*M-"

OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2, "hidden_dim_scale_factor": 2.0},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "exaone_moe": {"layer_types": SLIDING, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", "full_attention"] * 2},
    "gemma3n": {
        "text_config": {
            **TEXT,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 128,
            "sliding_window": 8,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": SLIDING,
            "activation_sparsity_pattern": [0.9] + [0.0] * (LAYERS - 1),
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gpt_bigcode": {"n_inner": 128},
    "glm_moe_dsa": {"rope_parameters": ROPE},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text_config": DEEPSEEK},
    "kimi_vl": {"text_config": DEEPSEEK},
    "kimi_linear": {"linear_attn_config": KDA},
    "kimi_k3": {
        "text_config": {
            **DEEPSEEK,
            "linear_attn_config": KDA,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "num_experts": 4,
            "num_experts_per_token": 2,
        }
    },
    "lfm2-vl": {
        "text_config": {
            **TEXT,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
        }
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {
        "text_config": {
            **TEXT,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "use_qk_norm": True,
            "attention_bias": False,
            "rope_scaling": None,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        }
    },
    "ministral3": {"rope_parameters": YARN, "layer_types": SLIDING},
    "mistral3": {"text_config": TEXT},
    "mistral4": {"rope_parameters": YARN, "num_key_value_heads": 4},
    "muse_spark": {
        "text_config": {
            **TEXT,
            "post_norm_eps": 1e-5,
            "rope_parameters": ROPE,
            "layer_rope_theta": [10000.0, 0.0] * 2,
            "layer_types": SLIDING,
            "sliding_window": 8,
            "final_logit_softcapping": 30.0,
            "output_multiplier": 1.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 32,
            "moe_intermediate_size": 32,
        }
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * 3
        + [{"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}]
    },
    "nemotron_h": {"hybrid_override_pattern": [*MAMBA_PATTERN]},
    "openelm": {
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0] * LAYERS,
        "ffn_dim_divisor": 8,
    },
    "phi3small": {"ff_intermediate_size": 128, "gegelu_limit": 20.0},
    "phixtral": {"num_vocab": 128},
    "pixtral": {"text_config": TEXT},
    "plamo": {"n_shared_head": 2},
    "qwen2_vl": {"text_config": {**TEXT, "model_type": "qwen2"}},
    "qwen3_vl": {"text_config": {**TEXT, "model_type": "qwen3"}},
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "spark2_5": {"rope_parameters": ROPES, "hidden_act": "gelu", "layer_types": SLIDING},
}


def small_config(name: str, module: ModuleType) -> dict[str, Any]:
    """A config.json of the architecture that `module` defines, of a few thousand parameters."""
    fields = dataclasses.fields(module.ModelArgs)
    sizes = {field.name: SIZES[field.name] for field in fields if field.name in SIZES}
    return {**sizes, "model_type": name, **OVERRIDES.get(name, {})}
