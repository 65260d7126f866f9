"""config.json of each family, from GGUF metadata and the shapes of tensors.

Adds what llama.cpp keeps in its code instead of its files: Gemma 3's period of six layers and local
frequency, gpt-oss's alternation and limits, Qwen 3's normalised expert weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import CheckpointError, UnsupportedModelError
from .facts import ArchitectureFields

_KINDS = ("sliding_attention", "full_attention")
_GEMMA3_27B = 62  # layers: how llama.cpp recognises the 27B, which scales by hidden / heads
_SIGMOID = 2  # expert_gating_func

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors, by the names of transformers
Config = dict[str, Any]


def _llama(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Mistral's files call themselves llama; only a window sets them apart."""
    if facts.count("expert_count"):
        raise UnsupportedModelError(
            f"{facts.all.where} is a mixture of experts of the llama architecture (Mixtral); "
            "not supported."
        )
    biased = "model.layers.0.self_attn.q_proj.bias" in shapes
    if facts.has("attention.sliding_window"):
        own = {"sliding_window": facts.integer("attention.sliding_window")}
        return _family("mistral", "MistralForCausalLM", facts) | own
    return _family("llama", "LlamaForCausalLM", facts) | {"attention_bias": biased}


def _qwen2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    return _family("qwen2", "Qwen2ForCausalLM", facts) | {"use_sliding_window": False}


def _qwen3(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    own = {"use_sliding_window": False, "attention_bias": False}
    return _family("qwen3", "Qwen3ForCausalLM", facts) | own


def _qwen3_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    return _family("qwen3_moe", "Qwen3MoeForCausalLM", facts) | {
        **_experts(facts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gemma3(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
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


def _gemma3_layers(facts: ArchitectureFields, num_layers: int) -> Config:
    """Newer files may say of each layer whether it slides."""
    slides = facts.all.get("gemma3.attention.sliding_window_pattern")
    if not isinstance(slides, np.ndarray):
        return {"sliding_window_pattern": facts.integer("attention.sliding_window_pattern", 6)}
    if slides.dtype.kind not in "biu" or slides.shape != (num_layers,):
        raise CheckpointError(
            f"sliding_window_pattern in {facts.all.where} is not one flag for each layer."
        )
    return {"layer_types": [_KINDS[0] if flag else _KINDS[1] for flag in slides]}


def _gpt_oss(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    scaling = config["rope_scaling"]
    return _family("gpt_oss", "GptOssForCausalLM", facts) | {
        **_experts(facts, count="num_local_experts", size="intermediate_size"),
        "experts_per_token": facts.integer("expert_used_count"),
        "attention_bias": True,
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": [_KINDS[index % 2] for index in range(config["num_hidden_layers"])],
        "swiglu_limit": 7.0,
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _gemma4(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Sizes by kind of layer; the frequencies of layers that see everything are a tensor."""
    count = config["num_hidden_layers"]
    slides = facts.by_layer("attention.sliding_window_pattern", count)
    widths = facts.by_layer("feed_forward_length", count)
    kv_heads = facts.by_layer("attention.head_count_kv", count)
    shared = facts.count("attention.shared_kv_layers")
    head_dim = facts.integer("attention.key_length_swa")
    by_kind = dict(zip(slides, kv_heads, strict=True))
    own = {i for i in range(count - shared) if not slides[i]}
    no_values = any(f"model.layers.{i}.self_attn.v_proj.weight" not in shapes for i in own)
    table = shapes.get("model.embed_tokens_per_layer.weight", (config["vocab_size"],))
    found = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "global_head_dim": facts.integer("attention.key_length"),
        "num_key_value_heads": by_kind.get(1, kv_heads[0]),
        "num_global_key_value_heads": by_kind.get(0, kv_heads[0]),
        "attention_k_eq_v": no_values,
        "num_kv_shared_layers": shared,
        "layer_types": [_KINDS[0] if flag else _KINDS[1] for flag in slides],
        "sliding_window": facts.integer("attention.sliding_window"),
        "hidden_size_per_layer_input": facts.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table[0],
        "final_logit_softcapping": facts.number("final_logit_softcapping"),
        "enable_moe_block": facts.count("expert_count") > 0,
    }
    if found["enable_moe_block"]:
        found |= _experts(facts, per_token="top_k_experts")
    return found


def gemma4_ropes(facts: ArchitectureFields, factors: NDArray[Any] | None) -> Config:
    """`rope_parameters`: which pairs turn where all is seen is said by the divisors that are 1."""
    full, sliding = facts.integer("attention.key_length"), facts.integer("attention.key_length_swa")
    turned = full if factors is None else 2 * int((factors == 1.0).sum())
    dims = facts.integer("rope.dimension_count_swa", sliding)
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": turned / full,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": facts.number("rope.freq_base_swa", 10_000.0),
            "partial_rotary_factor": dims / sliding,
        },
    }


def _delta_net(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Qwen3-Next too: as the later models have it, with a matrix for each projection."""
    layers = range(config["num_hidden_layers"])
    recurs = [f"model.layers.{i}.linear_attn.A_log" in shapes for i in layers]
    values, inner = facts.integer("ssm.time_step_rank"), facts.integer("ssm.inner_size")
    if inner % values:
        raise CheckpointError(
            f"ssm.inner_size in {facts.all.where} is {inner}, which {values} heads do not share."
        )
    found = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_act": "silu",
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurs],
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "linear_key_head_dim": facts.integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": facts.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "attention_bias": False,
    }
    if facts.architecture == "qwen35":
        return found | {"intermediate_size": facts.integer("feed_forward_length")}
    shared = shapes.get("model.layers.0.mlp.shared_expert.gate_proj.weight", (0,))[0]
    return found | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_experts(facts),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": True,
    }


def _lfm2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Layers without heads for K and V are convolutions."""
    kv_heads = facts.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    first = "model.layers.{}.conv.in_proj.bias"
    found = {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": facts.integer("shortconv.l_cache"),
        "conv_bias": any(first.format(i) in shapes for i in range(len(kv_heads))),
        "norm_eps": config["rms_norm_eps"],
        "intermediate_size": facts.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
    }
    if facts.architecture == "lfm2":
        return found
    return found | {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        **_experts(facts),
        "num_dense_layers": facts.count("leading_dense_block_count"),
        "use_expert_bias": any(name.endswith(".expert_bias") for name in shapes),
        "norm_topk_prob": True,
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }


def _glm4(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    biased = "model.layers.0.self_attn.q_proj.bias" in shapes
    return _family("glm4", "Glm4ForCausalLM", facts) | {"attention_bias": biased}


def _glm4_moe(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    own = _family("glm4_moe", "Glm4MoeForCausalLM", facts)
    return own | {
        **_routing(facts),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in shapes,
    }


def _deepseek2(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """DeepSeek V2 and V3, and what is built like them; older files have `kv_b` as one matrix."""
    sigmoid = facts.count("expert_gating_func") == _SIGMOID or any(
        name.endswith("e_score_correction_bias") for name in shapes
    )
    mla = "_mla" if facts.has("attention.key_length_mla") else ""
    rope = facts.integer("rope.dimension_count")
    rank = facts.integer("attention.q_lora_rank") if facts.has("attention.q_lora_rank") else None
    version = 3 if sigmoid else 2
    routing = _routing(facts)
    if not sigmoid:
        routing["topk_method"] = "greedy" if routing["n_group"] == 1 else "group_limited_greedy"
    own = _family(f"deepseek_v{version}", f"DeepseekV{version}ForCausalLM", facts)
    return own | {
        **routing,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope,
        "q_lora_rank": rank,
        "kv_lora_rank": facts.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": facts.integer(f"attention.key_length{mla}") - rope,
        "v_head_dim": facts.integer(f"attention.value_length{mla}"),
        "attention_bias": "model.layers.0.self_attn.kv_a_proj_with_mqa.bias" in shapes,
    }


def _experts(
    facts: ArchitectureFields,
    *,
    count: str = "num_experts",
    per_token: str = "num_experts_per_tok",
    size: str = "moe_intermediate_size",
) -> Config:
    """A mixture of experts under a family's keys."""
    return {
        count: facts.integer("expert_count"),
        per_token: facts.integer("expert_used_count"),
        size: facts.integer("expert_feed_forward_length"),
    }


def _routing(facts: ArchitectureFields) -> Config:
    """Experts as DeepSeek's configs state them."""
    return {
        **_experts(facts, count="n_routed_experts"),
        "n_shared_experts": facts.integer("expert_shared_count"),
        "first_k_dense_replace": facts.count("leading_dense_block_count"),
        "n_group": facts.integer("expert_group_count", 1),
        "topk_group": facts.integer("expert_group_used_count", 1),
        "norm_topk_prob": bool(facts.all.get(f"{facts.architecture}.expert_weights_norm")),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }


FamilyConfig = Callable[[ArchitectureFields, Shapes, Config], Config]
FAMILIES: dict[str, FamilyConfig] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3next": _delta_net,
    "qwen35": _delta_net,
    "qwen35moe": _delta_net,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
}
BY_LAYER = ("gemma4", "lfm2", "lfm2moe")  # heads for K and V differ between layers
PARTIAL = ("qwen3next", "qwen35", "qwen35moe", "glm4", "glm4moe")  # a part of each head turns


def _family(model_type: str, architecture: str, facts: ArchitectureFields) -> Config:
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
