"""Maps architectures to families, and finds the text model inside a multimodal checkpoint.

A family's module is imported when it is used. Only text goes in, so tensors that see and hear are
left out, by name. Positions of text alone are the same on all axes of a multimodal rope.
"""

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from ..errors import UnsupportedModelError
from .jsonfields import Fields

_LLAMA = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_QWEN3_5 = {"qwen3_5_text": "qwen3_5_text"}
_COHERE = {"cohere2": "cohere2", "cohere2_moe": "cohere2_moe"}
_GLM4V = {"glm4v_text": "glm4v_text", "glm4v": "glm4v_text"}
_QWEN2 = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen2_vl": "qwen2"}
WRAPPERS: Mapping[str, Mapping[str, str]] = {  # model_type -> those of its text, and ours of them
    "llama4": {"llama4_text": "llama4_text"},
    "pixtral": {"mistral": "mistral"},
    "mistral3": {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"},
    "kimi_k25": {"kimi_k2": "kimi_k2", "deepseek_v3": "deepseek_v3"},
    "kimi_vl": {"deepseek_v3": "deepseek_v3"},
    "lfm2_vl": {"lfm2": "lfm2", "lfm2_moe": "lfm2_moe"},
    "lfm3_vl": {"lfm3": "lfm3"},
    "lfm2-vl": {"lfm2": "lfm2", "lfm2_moe": "lfm2_moe"},
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": {**_QWEN2, "qwen2_5_vl": "qwen2"},
    "qwen3_vl": {"qwen3_vl_text": "qwen3", "qwen3_vl": "qwen3"},
    "qwen3_vl_moe": {"qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_moe": "qwen3_moe"},
    "aya_vision": _COHERE,
    "cohere2_vision": _COHERE,
    "deepseek_vl": _LLAMA,
    "deepseek_vl_hybrid": _LLAMA,
    "ernie4_5_vl_moe": dict.fromkeys(
        ("ernie4_5_vl_moe_text", "ernie4_5_vl_moe"), "ernie4_5_vl_moe_text"
    ),
    "ernie4_5_moe_vl": {"ernie4_5_moe_vl": "ernie4_5_vl_moe_text"},
    "exaone4_5": {"exaone4": "exaone4", "exaone4_5_text": "exaone4"},
    "fast_vlm": _LLAMA,
    "glm4v": _GLM4V,
    "glmga": _GLM4V,
    "glm46v": {**_GLM4V, "glm4v_moe_text": "glm4_moe"},
    "glm4v_moe": {"glm4v_moe_text": "glm4_moe"},
    "glm_ocr": {"glm_ocr_text": "glm_ocr_text"},
    "glm5_next": dict.fromkeys(("glm5_next_text", "glm5_next"), "glm5_next_text"),
    "got_ocr2": {"qwen2": "qwen2"},
    "granite4_vision": {"granite4_vision_text": "granite"},
    "hunyuan_vl": dict.fromkeys(("hunyuan_vl_text", "hunyuan_vl"), "hunyuan_v1_dense"),
    "idefics2": _LLAMA,
    "idefics3": _LLAMA,
    "inkling2_loop": {"inkling2_loop_text": "inkling2_loop_text"},
    "internvl": {**_LLAMA, "qwen3_moe": "qwen3_moe", "gpt_oss": "gpt_oss"},
    "internvl_chat": {**_LLAMA, "qwen3_moe": "qwen3_moe", "gpt_oss": "gpt_oss", "phi3": "phi3"},
    "lighton_ocr": {"qwen3": "qwen3"},
    "llava": _LLAMA,
    "llava_next": _LLAMA,
    "llava_next_video": _LLAMA,
    "llava_onevision": _LLAMA,
    "llava_qwen2": {"llava_qwen2": "qwen2"},
    "minicpm_ocr": _QWEN3_5,
    "minicpmv4_6": _QWEN3_5,
    "minicpmv4_7": _QWEN3_5,
    "phi3_v": {"phi3_v": "phi3"},
    "ovis2": _LLAMA,
    "paddleocr_vl": {"paddleocr_vl_text": "llama", "paddleocr_vl": "llama"},
    "perception_lm": _LLAMA,
    "minimax_m3_vl": dict.fromkeys(
        ("minimax_m3_vl_text", "minimax_m3_vl", "minimax_m2"), "minimax_m3_vl_text"
    ),
    "muse_glimmer": {"muse_glimmer_text": "muse_glimmer_text"},
    "nemotron_h_omni": {"nemotron_h": "nemotron_h"},
    "NemotronH_Nano_Omni_Reasoning_V3": {"nemotron_h": "nemotron_h"},
    "qianfan_ocr": {"qwen3": "qwen3"},
    "smolvlm": _LLAMA,
    "video_llama_3": _LLAMA,
    "video_llava": _LLAMA,
    "vipllava": _LLAMA,
    "step3p7": {"step3p5": "step3p5", "step3p7": "step3p5"},
}
_LANGUAGE = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "model.lm_head.": "lm_head.",
    "language_model.backbone.": "backbone.",
    "language_model.": "model.",
}
_BARE = ("embed_tokens.", "layers.", "norm.")  # of models without an output projection
_AHEAD = re.compile(r"(?:^|\.)(mtp[._].+)$")  # of a module that predicts tokens further ahead
_NUMBERED = re.compile(r"(?:^|\.)(?:mtp\.layers|mtp_[a-z_]+|model\.layers)\.(\d+)\.")
_SENSES = (
    *("visual.", "visual_embeddings_table.", "vision_", "embed_vision.", "vit.", "image_tower."),
    *("video_tower.", "high_res_vision_", "multi_modal_projector.", "mm_projector.", "projector."),
    *(
        "aligner.",
        "layerwise_projectors.",
        "spatial_projectors.",
        "connector.",
        "merger.",
        "mlp_AR.",
    ),
    *("resampler_model.", "mlp1.", "image_newline", "patch_merge_mlp.", "vit_large_projector."),
    *("audio_tower.", "audio_encoder.", "speech_embeddings.", "embed_audio.", "sound_"),
)


def text_config(config: Fields) -> Fields:
    """The config of the text model, by the name of its native family."""
    outer = config.text("model_type")
    if outer not in WRAPPERS:
        return config
    text = config.fields("text_config") or config.fields("llm_config") or config
    inner = text.text("model_type", default=outer)
    if inner not in WRAPPERS[outer]:
        raise UnsupportedModelError(
            f"The text model of {config.where} ({outer}) is {inner[:60]!r}; supported are "
            f"{', '.join(WRAPPERS[outer])}."
        )
    return Fields({**text.values, "model_type": WRAPPERS[outer][inner]}, text.where)


def language_name(name: str) -> str | None:
    """A tensor's name without the language model's prefix; None: it is of another part."""
    if name.removeprefix("model.").startswith(_SENSES):
        return None
    for prefix, ours in _LANGUAGE.items():
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return f"model.{name}" if name.startswith(_BARE) else name


def name_ahead(name: str) -> str | None:
    """A tensor's name within a module that predicts tokens further ahead; None: it is in none."""
    match = _AHEAD.search(name)
    return match[1] if match else None


FAMILIES = {  # model_type -> module in families/, class
    "llama": ("llama", "Llama"),
    "llama4_text": ("llama4", "Llama4"),
    "iquestcoder": ("llama", "IQuestCoder"),
    "mistral": ("llama", "Mistral"),
    "qwen2": ("qwen", "Qwen2"),
    "qwen3": ("qwen", "Qwen3"),
    "qwen3_moe": ("qwen", "Qwen3MoE"),
    "mellum": ("qwen", "Mellum"),
    "gemma2": ("gemma", "Gemma2"),
    "gemma3": ("gemma", "Gemma3"),
    "gemma3_text": ("gemma", "Gemma3"),
    "gemma4": ("gemma4", "Gemma4"),
    "gemma4_text": ("gemma4", "Gemma4"),
    "gemma4_unified": ("gemma4", "Gemma4Unified"),
    "gemma4_unified_text": ("gemma4", "Gemma4Unified"),
    "gemma3n": ("gemma3n", "Gemma3n"),
    "gemma3n_text": ("gemma3n", "Gemma3n"),
    "gpt_oss": ("gpt_oss", "GptOss"),
    "flint": ("flint", "Flint"),
    "kolibri1": ("biased_experts", "Kolibri1"),
    "inkling2_loop_text": ("inkling", "Inkling2Loop"),
    "k2_horizon": ("k2_horizon", "K2Horizon"),
    "olmo2": ("olmo", "Olmo2"),
    "olmo3": ("olmo", "Olmo3"),
    "olmo_hybrid": ("olmo", "OlmoHybrid"),
    "phi3": ("llama", "Phi3"),
    "granite": ("granite", "Granite"),
    "granite_swa": ("granite", "GraniteSWA"),
    "granitemoe_swa": ("granite", "GraniteMoESWA"),
    "granitemoehybrid": ("granite", "GraniteHybrid"),
    "deepseek_v2": ("deepseek", "DeepseekV2"),
    "deepseek_v3": ("deepseek", "DeepseekV3"),
    "deepseek_v32": ("deepseek", "DeepseekV32"),
    "xing4_0": ("mixed_streams", "Xing4"),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4"),
    "kimi_k2": ("deepseek", "DeepseekV3"),
    "joyai_llm_flash": ("deepseek", "DeepseekV3"),
    "youtu": ("deepseek", "Youtu"),
    "youtu_llm": ("deepseek", "Youtu"),
    "sarvam_mla": ("sarvam", "SarvamMLA"),
    "sarvam_moe": ("sarvam", "SarvamMoE"),
    "kimi_linear": ("kimi_linear", "KimiLinear"),
    "ministral": ("llama", "Mistral"),
    "cwm": ("llama", "Cwm"),
    "arcee": ("llama", "Arcee"),
    "hunyuan_v1_moe": ("llama", "HunYuanMoE"),
    "hy_v3": ("biased_experts", "HyV3"),
    "afmoe": ("biased_experts", "Afmoe"),
    "lfm3": ("lfm2", "Lfm3"),
    "laguna": ("laguna", "Laguna"),
    "step3p5": ("step", "Step3p5"),
    "muse_glimmer_text": ("muse", "MuseGlimmer"),
    "bailing_hybrid": ("bailing", "BailingHybrid"),
    "mixtral": ("mixtral", "Mixtral"),
    "glm": ("glm", "Glm"),
    "glm4": ("glm", "Glm4"),
    "glm4v_text": ("glm", "Glm4V"),
    "glm_ocr_text": ("glm", "GlmOcr"),
    "glm4_moe": ("glm", "Glm4MoE"),
    "smollm3": ("llama", "SmolLM3"),
    "cohere2": ("cohere", "Cohere2"),
    "cohere2_moe": ("cohere", "Cohere2MoE"),
    "cohere2moe": ("cohere", "Cohere2MoE"),
    "seed_oss": ("llama", "SeedOss"),
    "exaone4": ("olmo", "Exaone4"),
    "ernie4_5": ("llama", "Ernie4_5"),
    "mimo_v2_flash": ("mimo", "MiMoV2Flash"),
    "mimo_v2": ("mimo", "MiMoV2"),
    "minimax_m3_vl_text": ("minimax_m3", "MiniMaxM3"),
    "minimax_m3": ("minimax_m3", "MiniMaxM3"),
    "minimax_m2": ("mixtral", "MiniMaxM2"),
    "glm4_moe_lite": ("glm", "Glm4MoELite"),
    "glm_moe_dsa": ("glm", "GlmMoeDsa"),
    "glm5_next_text": ("glm5_next", "Glm5Next"),
    "solar_open": ("glm", "SolarOpen"),
    "dots1": ("biased_experts", "Dots1"),
    "exaone_moe": ("biased_experts", "ExaoneMoE"),
    "ernie4_5_moe": ("biased_experts", "Ernie4_5MoE"),
    "ernie4_5_vl_moe_text": ("biased_experts", "Ernie4_5VLMoE"),
    "starcoder2": ("starcoder", "Starcoder2"),
    "lfm2": ("lfm2", "Lfm2"),
    "lfm2_moe": ("lfm2", "Lfm2MoE"),
    "nemotron_h": ("nemotron", "NemotronH"),
    "nemotron_h_puzzle": ("nemotron", "NemotronHPuzzle"),
    "falcon_h1": ("falcon", "FalconH1"),
    "hunyuan_v1_dense": ("llama", "HunYuanDense"),
    "ministral3": ("ministral", "Ministral3"),
    "mistral4": ("ministral", "Mistral4"),
    "qwen3_next": ("qwen_hybrid", "Qwen3Next"),
    "qwen3_5": ("qwen_hybrid", "Qwen3_5"),
    "qwen3_5_text": ("qwen_hybrid", "Qwen3_5"),
    "qwen3_5_moe": ("qwen_hybrid", "Qwen3_5MoE"),
    "qwen3_5_moe_text": ("qwen_hybrid", "Qwen3_5MoE"),
    "prism_hadamard_qwen35": ("bonsai", "Bonsai2"),
    "qwen4_exp": ("qwen4_exp", "Qwen4Exp"),
    "qwen4_exp_text": ("qwen4_exp", "Qwen4Exp"),
    "bert": ("bert", "Bert"),
    "roberta": ("bert", "Roberta"),
    "xlm-roberta": ("bert", "Roberta"),
    "camembert": ("bert", "Roberta"),
    "distilbert": ("bert", "DistilBert"),
    "nomic_bert": ("nomic", "NomicBert"),
    "modernbert": ("modernbert", "ModernBert"),
}

SUPPORTED = (*FAMILIES, *WRAPPERS)
ENCODERS = frozenset(
    name for name, (module, _) in FAMILIES.items() if module in ("bert", "nomic", "modernbert")
)


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether a native family builds the model of a config.json, or reports the fault in it.

    Ling 2.6 and 3.0 share a name; only the latter has delta attention.
    """
    kind = config.get("model_type")
    if kind == "bailing_hybrid" and not {"kda_safe_gate", "kda_lower_bound"} & config.keys():
        return "BailingMoeV3ForCausalLM" in (config.get("architectures") or [])
    return not isinstance(kind, str) or kind in SUPPORTED


def is_encoder(config: Fields) -> bool:
    return config.get("model_type") in ENCODERS


def family(model_type: str) -> Any:
    """The `Family` subclass of an architecture."""
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"The architecture {model_type[:60]!r} has no native family here, which this needs. "
            f"Native families: {', '.join(SUPPORTED)}."
        )
    module, name = FAMILIES[model_type]
    return getattr(import_module(f".families.{module}", __package__), name)


def layer_ahead(name: str, num_layers: int) -> int | None:
    """The number of the predictor layer that a tensor belongs to; None: it is the model's.

    `num_layers`: of the model itself; those behind them predict.
    """
    number = _NUMBERED.search(language_name(name) or "")
    if name_ahead(name) is not None:
        return int(number[1]) if number else 0
    index = -1 if number is None else int(number[1]) - num_layers
    return None if index < 0 else index


def predictors_read(names: Iterable[str], config: Any) -> tuple[int, int]:
    """How many heads of a checkpoint predict tokens further ahead, and how many of them are read.

    Args:
        config: of its text, a `LanguageConfig`.
    """
    layers = {layer_ahead(name, config.num_layers) for name in names} - {None}
    kind = family(config.model_type) if config.definition == "native" else None
    if kind is None or kind.mtp is None:
        return len(layers), 0
    num_heads = -(-len(layers) // max(len(kind.mtp_blocks(config)), 1))
    return num_heads, int(0 in layers)


def predictors_text(count: int, read: int) -> str:
    heads = f"{count} heads that predict" if count > 1 else "a head that predicts"
    if read == count:
        return f"{heads} tokens further ahead (--speculate mtp)"
    if read:
        return f"{heads} tokens further ahead; the first is read (--speculate mtp), the others not"
    return f"{heads} tokens further ahead, not read here"
