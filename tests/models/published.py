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


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LFM2_LAYERS = (2, 5, 8, 10, 12, 14)
_LFM2_MOE_LAYERS = (2, 6, 10, 14, 18, 21)
_GEMMA4_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _model(
    kind: str,
    sizes: tuple[int, int, int, int, int, int],
    billions: float,
    kv: int,
    *,
    state: int = 0,
    gb_at_4_bits: float | None = None,
    **others: Any,
) -> Published:
    """A model of this type: layers, hidden and inner size, heads, KV heads, vocabulary; others."""
    config = {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **others}
    return Published(config, billions, kv, state, gb_at_4_bits)


def _gemma4(
    sizes: tuple[int, int, int, int, int, int],
    period: int,
    billions: float,
    kv: int,
    model_type: str = "gemma4_text",
    **others: Any,
) -> Published:
    shared: dict[str, Any] = {
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": _periodic(sizes[0], period, _SLIDING, _FULL),
        "rope_parameters": _GEMMA4_ROPES,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
    }
    return _model(model_type, sizes, billions, kv, **{**shared, **others})


PUBLISHED: dict[str, Published] = {
    "Llama-3.1-8B": _model(
        "llama", (32, 4096, 14336, 32, 8, 128_256), 8.03, 131_072, gb_at_4_bits=4.52
    ),
    "Llama-3.2-1B": _model(
        "llama",
        (16, 2048, 8192, 32, 8, 128_256),
        1.236,
        32_768,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "Llama-4-Scout-17B-16E": _model(  # 109 with what sees, which takes 0.9
        "llama4_text",
        (48, 5120, 8192, 40, 8, 202_048),
        107.8,
        196_608,
        head_dim=128,
        rope_theta=5e5,
    ),
    "Llama-4-Maverick-17B-128E": _model(
        "llama4_text",
        (48, 5120, 8192, 40, 8, 202_048),
        400.0,
        196_608,
        head_dim=128,
        rope_theta=5e5,
        num_local_experts=128,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
    ),
    "Mistral-7B-v0.3": _model(
        "mistral",
        (32, 4096, 14336, 32, 8, 32_768),
        7.248,
        131_072,
        gb_at_4_bits=4.08,
        sliding_window=None,
    ),
    "Mixtral-8x7B": _model("mixtral", (32, 4096, 14336, 32, 8, 32_000), 46.7, 131_072),
    "Ministral-3-8B": _model(
        "ministral3",
        (34, 4096, 14336, 32, 8, 131_072),
        8.49,
        139_264,
        head_dim=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "Mistral-Small-4-119B": _model(
        "mistral4",
        (36, 4096, 12288, 32, 32, 131_072),
        119.0,
        36 * 320 * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    ),
    "Qwen2.5-7B": _model("qwen2", (28, 3584, 18944, 28, 4, 152_064), 7.616, 57_344),
    "Qwen3-8B": _model(
        "qwen3", (36, 4096, 12288, 32, 8, 151_936), 8.191, 147_456, gb_at_4_bits=4.61, head_dim=128
    ),
    "Qwen3-30B-A3B": _model(
        "qwen3_moe",
        (48, 2048, 6144, 32, 4, 151_936),
        30.53,
        98_304,
        gb_at_4_bits=17.2,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "Qwen3-Next-80B-A3B": _model(
        "qwen3_next",
        (48, 2048, 5120, 16, 2, 151_936),
        79.67,
        24_576,
        state=36 * (3 * 8192 + 32 * 128 * 128) * 4,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen3.5-27B": _model(
        "qwen3_5_text",
        (64, 5120, 17408, 24, 4, 248_320),
        26.9,
        65_536,
        state=48 * (3 * 10_240 + 48 * 128 * 128) * 4,
        linear_num_value_heads=48,
    ),
    "Qwen3.5-35B-A3B": _model(
        "qwen3_5_moe_text",
        (40, 2048, 5632, 16, 2, 248_320),
        34.66,
        20_480,
        state=30 * (3 * 8192 + 32 * 128 * 128) * 4,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Gemma-2-9B": _model(
        "gemma2",
        (42, 3584, 14336, 16, 8, 256_000),
        9.24,
        344_064,
        head_dim=256,
        tie_word_embeddings=True,
    ),
    "Gemma-3-4B": _model(
        "gemma3_text",
        (34, 2560, 10240, 8, 4, 262_208),
        3.88,
        139_264,
        head_dim=256,
        sliding_window=1024,
        tie_word_embeddings=True,
    ),
    "Gemma-3n-E4B": _model(
        "gemma3n_text",
        (35, 2048, 16384, 8, 2, 262_400),
        6.87,
        20 * 2 * 2 * 256 * 2,
        head_dim=256,
        num_kv_shared_layers=15,
        tie_word_embeddings=True,
    ),
    "Gemma-4-E2B": _gemma4(
        (35, 1536, 6144, 8, 1, 262_144),
        5,
        4.65,
        (12 * 256 + 3 * 512) * 2 * 2,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "Gemma-4-E4B": _gemma4(
        (42, 2560, 10240, 8, 2, 262_144),
        6,
        7.5,
        (20 * 256 + 4 * 512) * 2 * 2 * 2,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=18,
    ),
    "Gemma-4-12B": _gemma4(
        (48, 3840, 15360, 16, 8, 262_144),
        6,
        11.9,
        (40 * 8 * 256 * 2 + 8 * 640) * 2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=1024,
        model_type="gemma4_unified_text",
    ),
    "Gemma-4-26B-A4B": _gemma4(
        (30, 2816, 2112, 16, 8, 262_144),
        6,
        25.2,
        (25 * 8 * 256 * 2 + 5 * 2 * 640) * 2,  # keys share 384 of 512 numbers with values
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=1024,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "Gemma-4-31B": _gemma4(
        (60, 5376, 21504, 32, 16, 262_144),
        6,
        30.7,
        (50 * 16 * 256 * 2 + 10 * 4 * 640) * 2,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=1024,
    ),
    "gpt-oss-20b": _model(
        "gpt_oss",
        (24, 2880, 2880, 64, 8, 201_088),
        20.91,
        49_152,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
    "OLMo-2-7B": _model("olmo2", (32, 4096, 11008, 32, 32, 100_352), 7.3, 524_288),
    "OLMo-3-7B": _model(
        "olmo3",
        (32, 4096, 11008, 32, 32, 100_278),
        7.3,
        524_288,
        sliding_window=4096,
        layer_types=_periodic(32, 4, _SLIDING, _FULL),
    ),
    "Phi-4-mini": _model(
        "phi3",
        (32, 3072, 8192, 24, 8, 200_064),
        3.836,
        131_072,
        partial_rotary_factor=0.75,
        pad_token_id=199_999,
        tie_word_embeddings=True,
    ),
    "Olmo-Hybrid-7B": _model(
        "olmo_hybrid",
        (32, 3840, 11008, 30, 30, 100_352),
        7.43,
        122_880,
        state=24 * (3 * 11_520 + 30 * 192 * 96) * 4,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "Granite-3.1-8B": _model(
        "granite", (40, 4096, 12800, 32, 8, 49_155), 8.17, 163_840, tie_word_embeddings=True
    ),
    "Granite-Swash-2B": _model(
        "granite_swa", (24, 2560, 8192, 20, 4, 100_352), 2.13, 49_152, tie_word_embeddings=True
    ),
    "Granite-Swash-3B-A600M": _model(
        "granitemoe_swa",
        (28, 1280, 512, 20, 4, 100_352),
        3.0,
        28_672,
        layer_types=[_FULL if i == 0 or i % 4 == 3 else _SLIDING for i in range(28)],
        num_local_experts=48,
        num_experts_per_tok=4,
        shared_intermediate_size=1280,
        tie_word_embeddings=True,
    ),
    "Granite-4.0-H-Tiny": _model(
        "granitemoehybrid",
        (40, 1536, 512, 12, 4, 100_352),
        6.94,
        8192,
        state=36 * (3 * 3328 + 48 * 64 * 128) * 4,
        layer_types=[_FULL if i in (5, 15, 25, 35) else "linear_attention" for i in range(40)],
        shared_intermediate_size=1024,
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        tie_word_embeddings=True,
    ),
    "DeepSeek-V2-Lite": _model(
        "deepseek_v2",
        (27, 2048, 10944, 16, 16, 102_400),
        15.71,
        31_104,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "DeepSeek-V3": _model(
        "deepseek_v3",
        (61, 7168, 18432, 128, 128, 129_280),
        671.0,
        70_272,
        num_nextn_predict_layers=0,
    ),
    "DeepSeek-V3.2": _model(
        "deepseek_v32",
        (61, 7168, 18432, 128, 128, 129_280),
        671.9,
        61 * (576 + 128) * 2,
        num_nextn_predict_layers=0,
    ),
    "GLM-5": _model(
        "glm_moe_dsa",
        (78, 6144, 12288, 64, 64, 154_880),
        744.0,
        78 * (576 + 128) * 2,
        num_nextn_predict_layers=0,
    ),
    "GLM-5.2": _model(
        "glm_moe_dsa",
        (78, 6144, 12288, 64, 64, 154_880),
        743.4,
        (78 * 576 + 21 * 128) * 2,
        num_nextn_predict_layers=0,
        index_topk_freq=4,
        index_skip_topk_offset=3,
        indexer_types=[*["full"] * 3, *[*["shared"] * 3, "full"] * 18, *["shared"] * 3],
    ),
    "Kimi-K2": _model(
        "kimi_k2",
        (61, 7168, 18432, 64, 64, 163_840),
        1026.4,
        70_272,
        n_routed_experts=384,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
    ),
    "Kimi-Linear-48B-A3B": _model(
        "kimi_linear",
        (27, 2304, 9216, 32, 32, 163_840),
        49.12,
        7 * 576 * 2,
        state=20 * (3 * 12_288 + 32 * 128 * 128) * 4,
        num_experts=256,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
        moe_renormalize=True,
        first_k_dense_replace=1,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [i for i in range(1, 27) if i % 4],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    ),
    "GLM-4-9B-0414": _model(
        "glm4", (40, 4096, 13696, 32, 2, 151_552), 9.4, 40_960, head_dim=128, attention_bias=False
    ),
    "LFM3-1.7B": _model(
        "lfm3",
        (24, 2048, 7680, 16, 4, 128_000),
        1.73,
        11 * 2048,
        state=13 * 6 * 2048 * 4,
        tie_word_embeddings=True,
    ),
    "Ministral-8B-2410": _model(
        "ministral", (36, 4096, 12288, 32, 8, 131_072), 8.02, 147_456, head_dim=128
    ),
    "AFM-4.5B": _model("arcee", (36, 2560, 18432, 20, 4, 128_004), 4.62, 73_728, head_dim=128),
    "Hunyuan-A13B": _model(
        "hunyuan_v1_moe",
        (32, 4096, 3072, 32, 8, 128_167),
        80.4,
        131_072,
        head_dim=128,
        num_experts=64,
        moe_topk=8,
        tie_word_embeddings=True,
    ),
    "Hy3": _model(
        "hy_v3", (80, 4096, 13312, 64, 8, 120_832), 295.0, 327_680, head_dim=128, num_experts=192
    ),
    "Trinity-Mini": _model(
        "afmoe",
        (32, 2048, 6144, 32, 4, 200_192),
        26.1,
        65_536,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=1,
        num_dense_layers=2,
        moe_intermediate_size=1024,
        sliding_window=2048,
    ),
    "Laguna-XS.2": _model(
        "laguna",
        (40, 2048, 8192, 48, 8, 100_352),
        33.4,
        163_840,
        layer_types=[_SLIDING if i % 4 else _FULL for i in range(40)],
        num_attention_heads_per_layer=[64 if i % 4 else 48 for i in range(40)],
        moe_routed_scaling_factor=2.5,
        rope_parameters={
            _FULL: {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "partial_rotary_factor": 0.5,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
            },
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "Ling-3.0-flash": _model(
        "bailing_hybrid",
        (42, 2560, 6144, 32, 32, 157_184),
        124.0,
        7 * 576 * 2,
        state=35 * (3 * 12_288 + 32 * 128 * 128) * 4,
        kda_safe_gate=True,
        num_local_experts=512,
        num_mtp_layers=0,
    ),
    "CWM-32B": _model("cwm", (64, 6144, 21504, 48, 8, 128_256), 32.6, 262_144),
    "GLM-4-9B-Chat": _model(
        "glm", (40, 4096, 13696, 32, 2, 151_552), 9.4, 40_960, head_dim=128, attention_bias=True
    ),
    "Solar-Open-100B": _model(
        "solar_open",
        (48, 4096, 10240, 64, 8, 196_608),
        102.6,
        196_608,
        head_dim=128,
        n_routed_experts=128,
        moe_intermediate_size=1280,
    ),
    "dots.llm1": _model(
        "dots1",
        (62, 4096, 10944, 32, 32, 152_064),
        142.8,
        1_015_808,
        head_dim=128,
        n_routed_experts=128,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        sliding_window=None,
    ),
    "K-EXAONE-236B-A23B": _model(
        "exaone_moe",
        (48, 6144, 18432, 64, 8, 153_600),
        236.6,
        196_608,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        sliding_window=128,
        layer_types=_periodic(48, 4, _SLIDING, _FULL),
    ),
    "ERNIE-4.5-21B-A3B": _model(
        "ernie4_5_moe",
        (28, 2560, 12288, 20, 4, 103_424),
        21.8,
        57_344,
        moe_num_experts=64,
        moe_k=6,
        moe_intermediate_size=1536,
        tie_word_embeddings=True,
    ),
    "StarCoder2-3B": _model(
        "starcoder2",
        (30, 3072, 12288, 24, 2, 49_152),
        3.03,
        30_720,
        sliding_window=4096,
        tie_word_embeddings=True,
    ),
    "GLM-4.5-Air": _model(
        "glm4_moe",
        (46, 4096, 10944, 96, 8, 151_552),
        106.0,
        188_416,
        head_dim=128,
        attention_bias=True,
        n_routed_experts=128,
        moe_intermediate_size=1408,
        num_nextn_predict_layers=0,
    ),
    "GLM-4.7-Flash": _model(
        "glm4_moe_lite",
        (47, 2048, 10240, 20, 20, 154_880),
        29.94,
        54_144,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
    ),
    "SmolLM3-3B": _model(
        "smollm3", (36, 2048, 11008, 16, 4, 128_256), 3.075, 73_728, tie_word_embeddings=True
    ),
    "Command-R7B": _model(
        "cohere2",
        (32, 4096, 14336, 32, 8, 256_000),
        8.03,
        131_072,
        sliding_window=4096,
        layer_types=_periodic(32, 4, _SLIDING, _FULL),
        tie_word_embeddings=True,
    ),
    "Seed-OSS-36B": _model(
        "seed_oss", (64, 5120, 27648, 80, 8, 155_136), 36.15, 262_144, head_dim=128
    ),
    "EXAONE-4.0-1.2B": _model(
        "exaone4",
        (30, 2048, 4096, 32, 8, 102_400),
        1.28,
        61_440,
        head_dim=64,
        sliding_window=None,
        sliding_window_pattern=None,
        layer_types=[_FULL] * 30,
        tie_word_embeddings=True,
    ),
    "ERNIE-4.5-0.3B": _model(
        "ernie4_5",
        (18, 1024, 3072, 16, 2, 103_424),
        0.361,
        18_432,
        head_dim=128,
        use_bias=False,
        tie_word_embeddings=True,
    ),
    "MiniMax-M2": _model(
        "minimax_m2",
        (62, 3072, 1536, 48, 8, 200_064),
        228.7,
        253_952,
        head_dim=128,
        rotary_dim=64,
        num_local_experts=256,
        num_experts_per_tok=8,
    ),
    "Hunyuan-7B": _model(
        "hunyuan_v1_dense",
        (32, 4096, 14336, 32, 8, 128_167),
        7.5,
        131_072,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "LFM2-1.2B": _model(
        "lfm2",
        (16, 2048, 12288, 32, 8, 65_536),
        1.17,
        12_288,
        state=10 * 2 * 2048 * 4,
        block_multiple_of=256,
        block_auto_adjust_ff_dim=True,
        layer_types=[_FULL if i in _LFM2_LAYERS else "conv" for i in range(16)],
        tie_word_embeddings=True,
    ),
    "LFM2-8B-A1B": _model(
        "lfm2_moe",
        (24, 2048, 7168, 32, 8, 65_536),
        8.34,
        12_288,
        state=18 * 2 * 2048 * 4,
        layer_types=[_FULL if i in _LFM2_MOE_LAYERS else "conv" for i in range(24)],
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
        tie_word_embeddings=True,
    ),
    "Nemotron-3-Nano-30B-A3B": _model(
        "nemotron_h",
        (52, 2688, 1856, 32, 2, 131_072),
        31.58,
        6144,
        state=23 * (3 * 6144 + 64 * 64 * 128) * 4,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        head_dim=128,
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
    ),
    "Falcon-H1-1.5B-Deep": _model(
        "falcon_h1",
        (66, 1280, 3072, 6, 2, 65_537),
        1.55,
        67_584,
        state=66 * (3 * 2048 + 24 * 64 * 256) * 4,
        head_dim=128,
        mamba_d_ssm=1536,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_d_conv=4,
    ),
}
