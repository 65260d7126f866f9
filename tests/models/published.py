"""Sizes of published models, one or more of each native family, from their config.json. No mlx.

Parameters are the text model's, as model cards count them, in billions. `kv` is bytes a token that
attention keeps in 16 bits where every layer sees everything, `state` bytes a sequence of recurrent
layers (float32, as kept here).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """One model.

    Args:
        config: config.json, as far as it states sizes.
        billions: parameters.
        kv: bytes a token in 16 bits.
        state: bytes a sequence.
        gb_at_4_bits: gigabytes of its conversion to 4 bits in groups of 64, where one is known.
    """

    config: dict[str, Any]
    billions: float
    kv: int
    state: int = 0
    gb_at_4_bits: float | None = None


def _periodic(count: int, period: int, often: str, seldom: str) -> list[str]:
    return [often if (i + 1) % period else seldom for i in range(count)]


_SLIDING, _FULL = "sliding_attention", "full_attention"
_LFM2_LAYERS = (2, 5, 8, 10, 12, 14)
_LFM2_MOE_LAYERS = (2, 6, 10, 14, 18, 21)
_GEMMA4_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _gemma4(layers: int, period: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "num_hidden_layers": layers,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": _periodic(layers, period, _SLIDING, _FULL),
        "rope_parameters": _GEMMA4_ROPES,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
        **others,
    }


def _sizes(layers: int, hidden: int, inner: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    }


PUBLISHED: dict[str, Published] = {
    "Llama-3.1-8B": Published(
        {"model_type": "llama", **_sizes(32, 4096, 14336, 32, 8, 128_256)},
        8.03,
        131_072,
        gb_at_4_bits=4.52,
    ),
    "Llama-3.2-1B": Published(
        {
            "model_type": "llama",
            **_sizes(16, 2048, 8192, 32, 8, 128_256),
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        1.236,
        32_768,
    ),
    "Llama-4-Scout-17B-16E": Published(  # 109 with what sees, which takes 0.9
        {
            "model_type": "llama4_text",
            **_sizes(48, 5120, 8192, 40, 8, 202_048),
            "head_dim": 128,
            "rope_theta": 5e5,
        },
        107.8,
        196_608,
    ),
    "Llama-4-Maverick-17B-128E": Published(
        {
            "model_type": "llama4_text",
            **_sizes(48, 5120, 8192, 40, 8, 202_048),
            "head_dim": 128,
            "rope_theta": 5e5,
            "num_local_experts": 128,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
        },
        400.0,
        196_608,
    ),
    "Mistral-7B-v0.3": Published(
        {
            "model_type": "mistral",
            **_sizes(32, 4096, 14336, 32, 8, 32_768),
            "sliding_window": None,
        },
        7.248,
        131_072,
        gb_at_4_bits=4.08,
    ),
    "Mixtral-8x7B": Published(
        {"model_type": "mixtral", **_sizes(32, 4096, 14336, 32, 8, 32_000)}, 46.7, 131_072
    ),
    "Ministral-3-8B": Published(
        {
            "model_type": "ministral3",
            **_sizes(34, 4096, 14336, 32, 8, 131_072),
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "llama_4_scaling_beta": 0.1,
            },
        },
        8.49,
        139_264,
    ),
    "Mistral-Small-4-119B": Published(
        {
            "model_type": "mistral4",
            **_sizes(36, 4096, 12288, 32, 32, 131_072),
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "llama_4_scaling_beta": 0.1,
                "partial_rotary_factor": 0.5,
            },
        },
        119.0,
        36 * 320 * 2,
    ),
    "Qwen2.5-7B": Published(
        {"model_type": "qwen2", **_sizes(28, 3584, 18944, 28, 4, 152_064)}, 7.616, 57_344
    ),
    "Qwen3-8B": Published(
        {"model_type": "qwen3", **_sizes(36, 4096, 12288, 32, 8, 151_936), "head_dim": 128},
        8.191,
        147_456,
        gb_at_4_bits=4.61,
    ),
    "Qwen3-30B-A3B": Published(
        {
            "model_type": "qwen3_moe",
            **_sizes(48, 2048, 6144, 32, 4, 151_936),
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
        30.53,
        98_304,
        gb_at_4_bits=17.2,
    ),
    "Qwen3-Next-80B-A3B": Published(
        {
            "model_type": "qwen3_next",
            **_sizes(48, 2048, 5120, 16, 2, 151_936),
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        79.67,
        24_576,
        36 * (3 * 8192 + 32 * 128 * 128) * 4,
    ),
    "Qwen3.5-27B": Published(
        {
            "model_type": "qwen3_5_text",
            **_sizes(64, 5120, 17408, 24, 4, 248_320),
            "linear_num_value_heads": 48,
        },
        26.9,
        65_536,
        48 * (3 * 10_240 + 48 * 128 * 128) * 4,
    ),
    "Qwen3.5-35B-A3B": Published(
        {
            "model_type": "qwen3_5_moe_text",
            **_sizes(40, 2048, 5632, 16, 2, 248_320),
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        34.66,
        20_480,
        30 * (3 * 8192 + 32 * 128 * 128) * 4,
    ),
    "Gemma-2-9B": Published(
        {
            "model_type": "gemma2",
            **_sizes(42, 3584, 14336, 16, 8, 256_000),
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        9.24,
        344_064,
    ),
    "Gemma-3-4B": Published(
        {
            "model_type": "gemma3_text",
            **_sizes(34, 2560, 10240, 8, 4, 262_208),
            "head_dim": 256,
            "sliding_window": 1024,
            "tie_word_embeddings": True,
        },
        3.88,
        139_264,
    ),
    "Gemma-3n-E4B": Published(
        {
            "model_type": "gemma3n_text",
            **_sizes(35, 2048, 16384, 8, 2, 262_400),
            "head_dim": 256,
            "num_kv_shared_layers": 15,
            "tie_word_embeddings": True,
        },
        6.87,
        20 * 2 * 2 * 256 * 2,
    ),
    "Gemma-4-E2B": Published(
        _gemma4(
            35,
            5,
            hidden_size=1536,
            intermediate_size=6144,
            num_attention_heads=8,
            num_key_value_heads=1,
            sliding_window=512,
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
        ),
        4.65,
        (12 * 256 + 3 * 512) * 2 * 2,
    ),
    "Gemma-4-E4B": Published(
        _gemma4(
            42,
            6,
            hidden_size=2560,
            intermediate_size=10240,
            num_attention_heads=8,
            num_key_value_heads=2,
            sliding_window=512,
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=18,
        ),
        7.5,
        (20 * 256 + 4 * 512) * 2 * 2 * 2,
    ),
    "Gemma-4-12B": Published(
        {
            **_gemma4(
                48,
                6,
                hidden_size=3840,
                intermediate_size=15360,
                num_attention_heads=16,
                num_key_value_heads=8,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                sliding_window=1024,
            ),
            "model_type": "gemma4_unified_text",
        },
        11.9,
        (40 * 8 * 256 * 2 + 8 * 640) * 2,
    ),
    "Gemma-4-26B-A4B": Published(
        _gemma4(
            30,
            6,
            hidden_size=2816,
            intermediate_size=2112,
            num_attention_heads=16,
            num_key_value_heads=8,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            sliding_window=1024,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
        25.2,
        (25 * 8 * 256 * 2 + 5 * 2 * 640) * 2,  # keys share 384 of 512 numbers with values
    ),
    "Gemma-4-31B": Published(
        _gemma4(
            60,
            6,
            hidden_size=5376,
            intermediate_size=21504,
            num_attention_heads=32,
            num_key_value_heads=16,
            num_global_key_value_heads=4,
            attention_k_eq_v=True,
            sliding_window=1024,
        ),
        30.7,
        (50 * 16 * 256 * 2 + 10 * 4 * 640) * 2,
    ),
    "gpt-oss-20b": Published(
        {
            "model_type": "gpt_oss",
            **_sizes(24, 2880, 2880, 64, 8, 201_088),
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        20.91,
        49_152,
    ),
    "OLMo-2-7B": Published(
        {"model_type": "olmo2", **_sizes(32, 4096, 11008, 32, 32, 100_352)}, 7.3, 524_288
    ),
    "OLMo-3-7B": Published(
        {
            "model_type": "olmo3",
            **_sizes(32, 4096, 11008, 32, 32, 100_278),
            "sliding_window": 4096,
            "layer_types": _periodic(32, 4, _SLIDING, _FULL),
        },
        7.3,
        524_288,
    ),
    "Phi-4-mini": Published(
        {
            "model_type": "phi3",
            **_sizes(32, 3072, 8192, 24, 8, 200_064),
            "partial_rotary_factor": 0.75,
            "pad_token_id": 199_999,
            "tie_word_embeddings": True,
        },
        3.836,
        131_072,
    ),
    "Granite-3.1-8B": Published(
        {
            "model_type": "granite",
            **_sizes(40, 4096, 12800, 32, 8, 49_155),
            "tie_word_embeddings": True,
        },
        8.17,
        163_840,
    ),
    "Granite-4.0-H-Tiny": Published(
        {
            "model_type": "granitemoehybrid",
            **_sizes(40, 1536, 512, 12, 4, 100_352),
            "layer_types": [
                _FULL if i in (5, 15, 25, 35) else "linear_attention" for i in range(40)
            ],
            "shared_intermediate_size": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "tie_word_embeddings": True,
        },
        6.94,
        8192,
        36 * (3 * 3328 + 48 * 64 * 128) * 4,
    ),
    "DeepSeek-V2-Lite": Published(
        {
            "model_type": "deepseek_v2",
            **_sizes(27, 2048, 10944, 16, 16, 102_400),
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        15.71,
        31_104,
    ),
    "DeepSeek-V3": Published(
        {
            "model_type": "deepseek_v3",
            **_sizes(61, 7168, 18432, 128, 128, 129_280),
            "num_nextn_predict_layers": 0,
        },
        671.0,
        70_272,
    ),
    "DeepSeek-V3.2": Published(
        {
            "model_type": "deepseek_v32",
            **_sizes(61, 7168, 18432, 128, 128, 129_280),
            "num_nextn_predict_layers": 0,
        },
        671.9,
        61 * (576 + 128) * 2,
    ),
    "GLM-5": Published(
        {
            "model_type": "glm_moe_dsa",
            **_sizes(78, 6144, 12288, 64, 64, 154_880),
            "num_nextn_predict_layers": 0,
        },
        744.0,
        78 * (576 + 128) * 2,
    ),
    "Kimi-K2": Published(
        {
            "model_type": "kimi_k2",
            **_sizes(61, 7168, 18432, 64, 64, 163_840),
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
        },
        1026.4,
        70_272,
    ),
    "Kimi-Linear-48B-A3B": Published(
        {
            "model_type": "kimi_linear",
            **_sizes(27, 2304, 9216, 32, 32, 163_840),
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_intermediate_size": 1024,
            "moe_renormalize": True,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [i for i in range(1, 27) if i % 4],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        49.12,
        7 * 576 * 2,
        20 * (3 * 12_288 + 32 * 128 * 128) * 4,
    ),
    "GLM-4-9B-0414": Published(
        {
            "model_type": "glm4",
            **_sizes(40, 4096, 13696, 32, 2, 151_552),
            "head_dim": 128,
            "attention_bias": False,
        },
        9.4,
        40_960,
    ),
    "GLM-4-9B-Chat": Published(
        {
            "model_type": "glm",
            **_sizes(40, 4096, 13696, 32, 2, 151_552),
            "head_dim": 128,
            "attention_bias": True,
        },
        9.4,
        40_960,
    ),
    "Solar-Open-100B": Published(
        {
            "model_type": "solar_open",
            **_sizes(48, 4096, 10240, 64, 8, 196_608),
            "head_dim": 128,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1280,
        },
        102.6,
        196_608,
    ),
    "dots.llm1": Published(
        {
            "model_type": "dots1",
            **_sizes(62, 4096, 10944, 32, 32, 152_064),
            "head_dim": 128,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "sliding_window": None,
        },
        142.8,
        1_015_808,
    ),
    "K-EXAONE-236B-A23B": Published(
        {
            "model_type": "exaone_moe",
            **_sizes(48, 6144, 18432, 64, 8, 153_600),
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "sliding_window": 128,
            "layer_types": _periodic(48, 4, _SLIDING, _FULL),
        },
        236.6,
        196_608,
    ),
    "ERNIE-4.5-21B-A3B": Published(
        {
            "model_type": "ernie4_5_moe",
            **_sizes(28, 2560, 12288, 20, 4, 103_424),
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "tie_word_embeddings": True,
        },
        21.8,
        57_344,
    ),
    "StarCoder2-3B": Published(
        {
            "model_type": "starcoder2",
            **_sizes(30, 3072, 12288, 24, 2, 49_152),
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        3.03,
        30_720,
    ),
    "GLM-4.5-Air": Published(
        {
            "model_type": "glm4_moe",
            **_sizes(46, 4096, 10944, 96, 8, 151_552),
            "head_dim": 128,
            "attention_bias": True,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "num_nextn_predict_layers": 0,
        },
        106.0,
        188_416,
    ),
    "GLM-4.7-Flash": Published(
        {
            "model_type": "glm4_moe_lite",
            **_sizes(47, 2048, 10240, 20, 20, 154_880),
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
        },
        29.94,
        54_144,
    ),
    "SmolLM3-3B": Published(
        {
            "model_type": "smollm3",
            **_sizes(36, 2048, 11008, 16, 4, 128_256),
            "tie_word_embeddings": True,
        },
        3.075,
        73_728,
    ),
    "Command-R7B": Published(
        {
            "model_type": "cohere2",
            **_sizes(32, 4096, 14336, 32, 8, 256_000),
            "sliding_window": 4096,
            "layer_types": _periodic(32, 4, _SLIDING, _FULL),
            "tie_word_embeddings": True,
        },
        8.03,
        131_072,
    ),
    "Seed-OSS-36B": Published(
        {
            "model_type": "seed_oss",
            **_sizes(64, 5120, 27648, 80, 8, 155_136),
            "head_dim": 128,
        },
        36.15,
        262_144,
    ),
    "EXAONE-4.0-1.2B": Published(
        {
            "model_type": "exaone4",
            **_sizes(30, 2048, 4096, 32, 8, 102_400),
            "head_dim": 64,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": [_FULL] * 30,
            "tie_word_embeddings": True,
        },
        1.28,
        61_440,
    ),
    "ERNIE-4.5-0.3B": Published(
        {
            "model_type": "ernie4_5",
            **_sizes(18, 1024, 3072, 16, 2, 103_424),
            "head_dim": 128,
            "use_bias": False,
            "tie_word_embeddings": True,
        },
        0.361,
        18_432,
    ),
    "MiniMax-M2": Published(
        {
            "model_type": "minimax_m2",
            **_sizes(62, 3072, 1536, 48, 8, 200_064),
            "head_dim": 128,
            "rotary_dim": 64,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        228.7,
        253_952,
    ),
    "Hunyuan-7B": Published(
        {
            "model_type": "hunyuan_v1_dense",
            **_sizes(32, 4096, 14336, 32, 8, 128_167),
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        7.5,
        131_072,
    ),
    "LFM2-1.2B": Published(
        {
            "model_type": "lfm2",
            **_sizes(16, 2048, 12288, 32, 8, 65_536),
            "block_multiple_of": 256,
            "block_auto_adjust_ff_dim": True,
            "layer_types": [_FULL if i in _LFM2_LAYERS else "conv" for i in range(16)],
            "tie_word_embeddings": True,
        },
        1.17,
        12_288,
        10 * 2 * 2048 * 4,
    ),
    "LFM2-8B-A1B": Published(
        {
            "model_type": "lfm2_moe",
            **_sizes(24, 2048, 7168, 32, 8, 65_536),
            "layer_types": [_FULL if i in _LFM2_MOE_LAYERS else "conv" for i in range(24)],
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "tie_word_embeddings": True,
        },
        8.34,
        12_288,
        18 * 2 * 2048 * 4,
    ),
    "Nemotron-3-Nano-30B-A3B": Published(
        {
            "model_type": "nemotron_h",
            "vocab_size": 131_072,
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "num_hidden_layers": 52,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
        31.58,
        6144,
        23 * (3 * 6144 + 64 * 64 * 128) * 4,
    ),
    "Falcon-H1-1.5B-Deep": Published(
        {
            "model_type": "falcon_h1",
            **_sizes(66, 1280, 3072, 6, 2, 65_537),
            "head_dim": 128,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
        },
        1.55,
        67_584,
        66 * (3 * 2048 + 24 * 64 * 256) * 4,
    ),
}
