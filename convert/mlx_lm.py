"""Makes configs readable for mlx-lm 0.32.2, and names the keys that it ignores.

Its definitions ask for keys under other names; these are written beside the keys of the source. A
key that mlx-lm ignores is named at the end of a conversion: mlx-lm then refuses the folder, or
gives other logits.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..models.config import ModelConfig
from .arrange import language_config
from .read import SourceModel

# Families whose tensors mlx-lm wants in another layout, and those that it does not define.
OTHERWISE = (
    "falcon_h1", "gemma3n_text", "granitemoehybrid", "llama4_text", "qwen3_next",
    "step3p5",
    "mimo_v2_flash",  # its windows are a token shorter there
)  # fmt: skip
UNDEFINED_BY_MLX_LM = (
    "arcee", "bailing_hybrid", "cohere2_moe", "cwm", "deepseek_v4",  # its Bailing is Ling 2.6
    "glm5_next_text",
    "granite_swa", "granitemoe_swa", "hunyuan_v1_moe", "hy_v3", "lfm3", "minimax_m3_vl_text",
    "ministral", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "youtu",
    "flint", "inkling2_loop_text", "iquestcoder", "k2_horizon", "kolibri1", "mimo_v2",
    "nemotron_h_puzzle", "xing4_0",
)  # fmt: skip
_NO_SCALING = {"rope_scaling": None}
_NO_BIAS = {"attention_bias": False}
_NO_WINDOW = {"sliding_window": None}
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# Keys that a definition does not read -> the value that it takes for granted.
_ASSUMED: dict[str, dict[str, Any]] = {
    "afmoe": _NO_BIAS,
    "cohere2": _TIED,
    "deepseek_v2": _UNTIED,
    "deepseek_v3": _UNTIED,
    "dots1": _NO_BIAS,
    "gemma2": _TIED | _NO_WINDOW,
    "gemma3_text": {"final_logit_softcapping": None},
    "glm": {"partial_rotary_factor": 1.0} | _NO_SCALING,
    "glm4": _UNTIED | _NO_SCALING,
    "glm4_moe": _UNTIED | _NO_SCALING,
    "glm_moe_dsa": {"index_topk_freq": 1, "index_topk_pattern": None},
    "gpt_oss": {"swiglu_limit": 7.0},
    "lfm2": _TIED,
    "lfm2_moe": _TIED,
    "mellum": _NO_BIAS,
    "mistral": _NO_WINDOW,
    "ministral3": _NO_WINDOW,
    "phi3": _NO_WINDOW,
    "qwen2": _NO_WINDOW,
    "qwen3": _NO_BIAS | _NO_WINDOW,
    "solar_open": _UNTIED | _NO_SCALING,
    "starcoder2": {"use_bias": True} | _NO_WINDOW,
    "youtu_llm": {"rope_interleave": True},
}
_NEWER = ("ministral3", "qwen3_5", "qwen3_5_moe")  # they read rope_parameters only
_WHOLE_HEADS = ("granite", "mixtral", "phi3")  # their heads share out hidden_size


def read_by_mlx_lm(source: SourceModel, model: ModelConfig) -> bool:
    """Whether mlx-lm takes this family's tensors in the layout that transformers gives them."""
    nested = language_config(source.config) is not None and model.model_type != "gemma3n_text"
    return model.model_type not in UNDEFINED_BY_MLX_LM and (
        nested or model.model_type not in OTHERWISE
    )


def passed_over(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """The keys of a language model's config that its definition in mlx-lm does not read."""
    return list(dict.fromkeys(_passed_over(config, model)))


def _passed_over(config: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    kind = model.model_type
    for key, assumed in _ASSUMED.get(kind, {}).items():
        if key == "sliding_window":
            if any(window and window < model.max_context for window in model.windows):
                yield key
        elif (config.get(key, assumed) or None) != (assumed or None):
            yield key
    if kind in _WHOLE_HEADS and model.head_dim * model.num_heads != model.hidden_size:
        yield "head_dim"
    if kind == "ernie4_5_moe":
        yield "moe_statics.e_score_correction_bias"
    if kind == "laguna" and config.get("gating") == "per-element":
        yield "gating"
    scaling = config.get("rope_scaling") or {}
    if kind == "phi3" and "short_factor" in scaling:
        yield "rope_scaling.short_factor"  # the factors for long texts serve all
    if scaling.get("attention_factor") is not None:
        yield "rope_scaling.attention_factor"
    yield from _irregular(config, model)


def _irregular(config: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    states, sparse = model.states, model.sparse_layers
    if model.model_type.startswith("qwen3_5"):
        period = model.fields.integer("full_attention_interval")
        if any((state is None) != (not (i + 1) % period) for i, state in enumerate(states)):
            yield "layer_types"
    stated = config.get("mlp_layer_types") and "is_moe_layer" not in config
    if stated and False in sparse[_first(sparse) :]:
        yield "mlp_layer_types"


def asked_for(model: ModelConfig) -> dict[str, Any]:
    """Keys that a definition in mlx-lm cannot do without, or for which it assumes otherwise."""
    asked = _ASKED.get(model.model_type)
    return {} if asked is None else asked(model)


def respelled(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Keys that a definition reads in one spelling only, in place of the same in another one."""
    if model.model_type == "gemma4_text":  # without the key it takes the size of Gemma's caps
        return {"final_logit_softcapping": config.get("final_logit_softcapping")}
    pattern = config.get("sliding_window_pattern")
    if model.model_type == "exaone4" and not isinstance(pattern, str):
        letters = "".join("L" if window else "G" for window in model.windows)
        return {"sliding_window_pattern": letters if any(model.windows) else None}
    if model.model_type not in _NEWER or config.get("rope_parameters") is not None:
        return {}
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", scaling.get("rope_type", "default"))
    names = ("rope_theta", "partial_rotary_factor")
    stated = {name: config[name] for name in names if config.get(name) is not None}
    return {"rope_parameters": {**scaling, "rope_type": kind, "type": kind, **stated}}


def _of_kimi(model: ModelConfig) -> dict[str, Any]:
    fields, recurrent = model.fields, [state is not None for state in model.states]
    layers = range(1, model.num_layers + 1)
    delta = {
        "kda_layers": [number for number in layers if recurrent[number - 1]],
        "full_attn_layers": [number for number in layers if not recurrent[number - 1]],
        "num_heads": fields.get("linear_num_heads"),
        "head_dim": fields.get("linear_head_dim"),
        "short_conv_kernel_size": fields.get("linear_conv_kernel_dim"),
    }
    return {
        "linear_attn_config": delta,
        "rope_theta": 10_000.0,  # there is no rope
        "model_max_length": model.max_context,
        "num_experts_per_token": model.experts_per_token,
        "moe_renormalize": model.norm_topk_prob,
        "num_shared_experts": fields.get("n_shared_experts"),
        "num_expert_group": fields.get("n_group"),
        "first_k_dense_replace": _first(model.sparse_layers),
    }


def _global_head_dim(model: ModelConfig) -> int | None:
    """The size of heads in layers that see everything; None: there is no such layer."""
    pairs = zip(model.windows, model.heads, strict=False)
    return next((head_dim for window, (_, head_dim) in pairs if window is None), None)


def _first(chosen: tuple[bool, ...]) -> int:
    return next((index for index, one in enumerate(chosen) if one), len(chosen))


def _last(chosen: tuple[bool, ...]) -> int | None:
    """The last of the chosen layers; None: there is none."""
    return max((index for index, one in enumerate(chosen) if one), default=None)


def _of_nemotron(model: ModelConfig) -> dict[str, Any]:
    fields = model.fields
    return {
        "attention_bias": False,
        "conv_kernel": fields.get("mamba_d_conv"),
        "mamba_proj_bias": fields.get("use_bias"),
        "mlp_bias": False,
    }


def _of_olmo_hybrid(model: ModelConfig) -> dict[str, Any]:
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    names = [f"linear_{field}" for field in (*sizes, "conv_kernel_dim", "allow_neg_eigval")]
    asked = {name: model.fields.get(name) for name in names}
    return {**asked, "attention_bias": model.qkv_bias}


def _of_minimax(model: ModelConfig) -> dict[str, Any]:
    rope = model.ropes[0]
    return {"rotary_dim": rope and rope.dims, "shared_intermediate_size": 0}


_ASKED: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "afmoe": lambda model: {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in model.windows],
        "num_dense_layers": _first(model.sparse_layers),
    },
    "deepseek_v2": lambda _: {"rope_scaling": {"type": "yarn", "factor": 1.0}},  # stretches nothing
    "ernie4_5_moe": lambda model: {"moe_layer_end_index": _last(model.sparse_layers)},
    "exaone_moe": lambda model: {
        "num_shared_experts": model.fields.get("n_shared_experts"),
        "is_moe_layer": list(model.sparse_layers),
    },
    "gemma4_text": lambda model: {"global_head_dim": _global_head_dim(model)},
    "glm_moe_dsa": lambda _: {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    },
    "kimi_linear": _of_kimi,
    "laguna": lambda model: {"qkv_bias": model.qkv_bias},
    "lfm2": lambda model: {"block_dim": model.hidden_size},
    "lfm2_moe": lambda model: {"block_dim": model.hidden_size},
    "mellum": lambda model: {"num_experts": model.num_experts},
    "minimax_m2": _of_minimax,
    "nemotron_h": _of_nemotron,
    "olmo_hybrid": _of_olmo_hybrid,
}
