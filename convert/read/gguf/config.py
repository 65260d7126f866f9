"""GGUF metadata -> config.json as transformers writes it. Uses the shapes of tensors only.

Adds what llama.cpp keeps in its code instead of its files: Gemma 3's period of six layers and local
frequency, gpt-oss's alternation and limits, Qwen 3's normalised expert weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ....models.jsonfields import Fields
from ..stored import Array


class ArchitectureFields:
    """The metadata of one architecture, read key by key."""

    def __init__(self, metadata: Mapping[str, Any], label: str) -> None:
        self.all = Fields(metadata, label)
        self.architecture = self.all.text("general.architecture")

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

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return self.all.get(f"{self.architecture}.{key}") is not None


def check_rope_dims(facts: ArchitectureFields, head_dim: int) -> None:
    """Raise UnsupportedModelError where a head is turned in part."""
    dims = facts.integer("rope.dimension_count", head_dim)
    if dims != head_dim:
        raise UnsupportedModelError(
            f"{facts.all.where} turns {dims} of {head_dim} dimensions; expected all of them."
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
    return scaling


def _llama3_scaling(
    facts: ArchitectureFields, factors: Array, head_dim: int
) -> dict[str, Any] | None:
    """The settings that give these divisors of the frequencies; files have no other trace of them.

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


_MAX_LAYERS = 2000
_KINDS = ("sliding_attention", "full_attention")
_GEMMA3_27B = 62  # layers: how llama.cpp recognises the 27B, which scales by hidden / heads


def make_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Array | None,
    label: str,
) -> dict[str, Any]:
    """config.json for a GGUF file.

    Args:
        shapes: of the tensors, by the names of transformers.
        rope_factors: the tensor that llama.cpp makes of Llama 3's scaling, float32.

    Raises:
        CheckpointError: a key is missing or out of range.
        UnsupportedModelError: a feature that the family has not here.
    """
    facts = ArchitectureFields(metadata, label)
    family = _FAMILIES[facts.architecture]
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    head_dim = facts.integer("attention.key_length", max(hidden // heads, 1))
    table = shapes.get("model.embed_tokens.weight")
    if table is None or len(table) != 2 or table[1] != hidden:
        raise CheckpointError(f"{label} has no token_embd.weight of {hidden} columns.")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": facts.all.integer(
            f"{facts.architecture}.block_count", high=_MAX_LAYERS
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": table[0],
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": facts.integer("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(facts, rope_factors, head_dim),
        **_token_ids(facts.all),
    }
    check_rope_dims(facts, head_dim)
    return config | family(facts, shapes, config)


def _llama(
    facts: ArchitectureFields, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    """Mistral's files call themselves llama; only a window sets them apart."""
    if facts.has("expert_count") and facts.all.integer("llama.expert_count", low=0):
        raise UnsupportedModelError(
            f"{facts.all.where} is a mixture of experts of the llama architecture (Mixtral); "
            "not supported."
        )
    biased = "model.layers.0.self_attn.q_proj.bias" in shapes
    if facts.has("attention.sliding_window"):
        own = {"sliding_window": facts.integer("attention.sliding_window")}
        return _family("mistral", "MistralForCausalLM", facts) | own
    return _family("llama", "LlamaForCausalLM", facts) | {"attention_bias": biased}


def _qwen2(
    facts: ArchitectureFields, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    return _family("qwen2", "Qwen2ForCausalLM", facts) | {"use_sliding_window": False}


def _qwen3(
    facts: ArchitectureFields, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    own = {"use_sliding_window": False, "attention_bias": False}
    return _family("qwen3", "Qwen3ForCausalLM", facts) | own


def _qwen3_moe(
    facts: ArchitectureFields, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    return _family("qwen3_moe", "Qwen3MoeForCausalLM", facts) | {
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "num_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _gemma3(
    facts: ArchitectureFields, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
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


def _gemma3_layers(facts: ArchitectureFields, num_layers: int) -> dict[str, Any]:
    """Newer files may say of each layer whether it slides."""
    slides = facts.all.get("gemma3.attention.sliding_window_pattern")
    if not isinstance(slides, np.ndarray):
        return {"sliding_window_pattern": facts.integer("attention.sliding_window_pattern", 6)}
    if slides.dtype.kind not in "biu" or slides.shape != (num_layers,):
        raise CheckpointError(
            f"sliding_window_pattern in {facts.all.where} is not one flag for each layer."
        )
    return {"layer_types": [_KINDS[0] if flag else _KINDS[1] for flag in slides]}


def _gpt_oss(
    facts: ArchitectureFields, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]
) -> dict[str, Any]:
    per_token = facts.integer("expert_used_count")
    scaling = config["rope_scaling"]
    return _family("gpt_oss", "GptOssForCausalLM", facts) | {
        "intermediate_size": facts.integer("expert_feed_forward_length"),
        "num_local_experts": facts.integer("expert_count"),
        "num_experts_per_tok": per_token,
        "experts_per_token": per_token,
        "attention_bias": True,
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": [_KINDS[index % 2] for index in range(config["num_hidden_layers"])],
        "swiglu_limit": 7.0,
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


_Family = Callable[
    [ArchitectureFields, Mapping[str, tuple[int, ...]], dict[str, Any]], dict[str, Any]
]
_FAMILIES: dict[str, _Family] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}


def _family(model_type: str, architecture: str, facts: ArchitectureFields) -> dict[str, Any]:
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


def _token_ids(metadata: Fields) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    names = {key: f"tokenizer.ggml.{name}_token_id" for key, name in keys.items()}
    return {
        key: metadata.integer(name, low=0)
        for key, name in names.items()
        if metadata.get(name) is not None
    }
