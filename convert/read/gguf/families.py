"""config.json of each family, from GGUF metadata and the shapes of tensors.

Metadata are read as the architecture spells them, rotary embeddings among them.

Adds what llama.cpp keeps in its code instead of its files: Gemma 3's period of six layers and local
frequency, gpt-oss's alternation and limits, Qwen 3's normalised expert weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import CheckpointError, UnsupportedModelError
from ....models.jsonfields import Fields
from ..stored import Array

_MAX_LAYERS = 2000


class ArchitectureFields:
    """The metadata of one architecture, read key by key."""

    def __init__(self, metadata: Mapping[str, Any], label: str) -> None:
        self.all = Fields(metadata, label)
        self.architecture = self.all.text("general.architecture")

    @property
    def num_layers(self) -> int:
        """Of the decoder: blocks that predict further ahead lie behind them."""
        name = f"{self.architecture}.block_count"
        count = self.all.integer(name, high=_MAX_LAYERS) - self.count("nextn_predict_layers")
        if count < 1:
            raise CheckpointError(f"{name} in {self.all.where} leaves no layer.")
        return count

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array of the same one for each layer counts."""
        name = f"{self.architecture}.{key}"
        value = self.all.get(name)
        if isinstance(value, np.ndarray):
            different = np.unique(value).tolist() if value.dtype.kind in "iu" else []
            if len(different) != 1:
                raise UnsupportedModelError(
                    f"{name} in {self.all.where} differs between layers; not supported."
                )
            return Fields({name: different[0]}, self.all.where).integer(name)
        return (
            self.all.integer(name) if default is None else self.all.integer(name, default=default)
        )

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or the default."""
        name = f"{self.architecture}.{key}"
        return self.all.number(name, above=0.0, default=default)

    def count(self, key: str) -> int:
        """A number that may be 0, and is 0 where the file does not state it."""
        return self.all.integer(f"{self.architecture}.{key}", low=0, default=0)

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """An integer for each layer, listed or one for all."""
        name = f"{self.architecture}.{key}"
        value = self.all.get(name)
        if not isinstance(value, np.ndarray):
            return [self.all.integer(name, low=0)] * num_layers
        if value.dtype.kind not in "biu" or len(value) < num_layers or value.min() < 0:
            raise CheckpointError(f"{name} in {self.all.where} is not one number for each layer.")
        return [int(each) for each in value[:num_layers]]

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return self.all.get(f"{self.architecture}.{key}") is not None


def check_rope_dims(facts: ArchitectureFields, head_dim: int) -> None:
    """Raise UnsupportedModelError where a head is turned in part."""
    dims = facts.integer("rope.dimension_count", head_dim)
    if dims != head_dim:
        raise UnsupportedModelError(
            f"The rope of {facts.all.where} turns {dims} of {head_dim} dimensions; expected all."
        )


def rope_scaling(
    facts: ArchitectureFields, factors: Array | None, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json; `factors` are the tensor that stands for Llama 3's.

    Raises:
        CheckpointError, UnsupportedModelError: a kind that is not known.
    """
    if factors is not None:
        return _llama3_scaling(facts, factors, head_dim)
    # As llama.cpp: linear where no type is stated, with a factor under its older name perhaps.
    kind = facts.all.text(f"{facts.architecture}.rope.scaling.type", default="linear")
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0)) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"rope.scaling.type in {facts.all.where} is {kind[:40]!r}; expected linear or yarn."
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        stated = facts.integer("context_length")
        context = facts.integer("rope.scaling.original_context_length", stated)
        scaling["original_max_position_embeddings"] = context
        scaling["beta_fast"] = facts.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = facts.number("rope.scaling.yarn_beta_slow", 1.0)
        if (tenth := facts.number("rope.scaling.yarn_log_multiplier")) is not None:
            # A tenth of mscale_all_dim. What divides it, mscale, is the same in published models.
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))
    return scaling


def _llama3_scaling(
    facts: ArchitectureFields, factors: Array, head_dim: int
) -> dict[str, Any] | None:
    """Find the settings that give these divisors of the frequencies. Files do not state them.

    Llama 3 (github.com/meta-llama/llama-models, apply_scaling) leaves short waves as they are,
    divides the frequency of long ones by `factor`, and blends in between.
    """
    theta = facts.number("rope.freq_base", 10_000.0)
    assert theta is not None
    if factors.shape != (head_dim // 2,) or not np.isfinite(factors).all() or factors.min() < 1.0:
        raise CheckpointError(f"rope_freqs.weight of {facts.all.where} is not as expected.")
    if (factors == 1.0).all():
        return None
    factor = round(float(factors.max()), 4)
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for context in (2**power for power in range(1, 24)):
        smooth = np.clip((context / waves - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise UnsupportedModelError(
        f"rope_freqs.weight of {facts.all.where} is not Llama 3's scaling of any context length."
    )


# -- families -----------------------------------------------------------------------------------

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
