"""config.json of Gemma's families, as `families.py` has those of the others."""

from statistics import NormalDist
from typing import Any

from numpy.typing import NDArray

from .fields import ArchitectureFields
from .names import NUM_STREAMS
from .parts import (
    KINDS,
    Config,
    Shapes,
    experts_of,
    layer_types_of,
    make_family,
    number_of,
    rows_of,
    window_of,
)

_GEMMA3_27B = 62  # layers: how llama.cpp recognises the 27B, which scales by hidden / heads
_GEMMA2_27B = 46


def _gemma2_scale(facts: ArchitectureFields, shapes: Shapes, config: Config) -> int:
    """Of queries; llama.cpp knows the 27B, which scales by hidden / heads, by its layers."""
    large = config["num_hidden_layers"] == _GEMMA2_27B
    return config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]


def gemma3(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    large = config["num_hidden_layers"] == _GEMMA3_27B
    per_head = config["hidden_size"] // config["num_attention_heads"]
    fields = make_family("gemma3_text", "Gemma3ForCausalLM")(facts, shapes, config)
    del fields["hidden_act"]
    return fields | {
        **_gemma3_layers(facts, config["num_hidden_layers"]),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if large else config["head_dim"],
        "sliding_window": facts.integer("attention.sliding_window"),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def gemma_embedding(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Gemma 3 that sees both ways."""
    facts.expect("attention.causal", False)
    facts.read(*(f"dense_{i}_feat_{way}" for i in (2, 3) for way in ("in", "out")))
    return gemma3(facts, shapes, config) | {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
    }


def _gemma3_layers(facts: ArchitectureFields, num_layers: int) -> Config:
    slides = facts.by_layer_or_none("attention.sliding_window_pattern", num_layers)
    if slides is None:
        return {"sliding_window_pattern": facts.integer("attention.sliding_window_pattern", 6)}
    return {"layer_types": [KINDS[0] if flag else KINDS[1] for flag in slides]}


def gemma4(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Sizes by kind of layer; the frequencies of layers that see everything are a tensor."""
    count = config["num_hidden_layers"]
    slides = facts.by_layer("attention.sliding_window_pattern", count)
    widths = facts.by_layer("feed_forward_length", count)
    kv_heads = facts.by_layer("attention.head_count_kv", count)
    shared = facts.count("attention.shared_kv_layers")
    head_dim = facts.integer("attention.key_length_swa")
    facts.expect("attention.value_length_swa", head_dim)
    facts.expect("rope.dimension_count", facts.integer("attention.key_length"))
    by_kind = dict(zip(slides, kv_heads, strict=True))
    with_values = {i for i in range(count - shared) if not slides[i]}
    no_values = any(f"model.layers.{i}.self_attn.v_proj.weight" not in shapes for i in with_values)
    table = shapes.get("model.embed_tokens_per_layer.weight", (config["vocab_size"],))
    fields = {
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
        "layer_types": [KINDS[0] if flag else KINDS[1] for flag in slides],
        "sliding_window": facts.integer("attention.sliding_window"),
        "hidden_size_per_layer_input": facts.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table[0],
        "final_logit_softcapping": facts.number("final_logit_softcapping"),
        "enable_moe_block": facts.count("expert_count") > 0,
    }
    if fields["enable_moe_block"]:
        fields |= experts_of(facts, per_token="top_k_experts")
    return fields


def gemma4_ropes(facts: ArchitectureFields, factors: NDArray[Any] | None) -> Config:
    """`rope_parameters`; in layers that see everything the pairs with a divisor of 1 rotate."""
    full, sliding = facts.integer("attention.key_length"), facts.integer("attention.key_length_swa")
    rotated = full if factors is None else 2 * int((factors == 1.0).sum())
    dims = facts.integer("rope.dimension_count_swa", sliding)
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": rotated / full,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": facts.number("rope.freq_base_swa", 10_000.0),
            "partial_rotary_factor": dims / sliding,
        },
    }


def gemma3n(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
    """Cuts of gates are distances from the mean in the file, and shares in transformers."""
    facts.expect("altup.num_inputs", NUM_STREAMS)
    count = config["num_hidden_layers"]
    cuts = facts.numbers("activation_sparsity_scale", count)
    widths = facts.by_layer("feed_forward_length", count)
    family = make_family("gemma3n_text", "Gemma3nForCausalLM", intermediate_size=widths)
    return family(facts, shapes, config) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "activation_sparsity_pattern": [round(NormalDist().cdf(cut), 6) for cut in cuts],
        "hidden_size_per_layer_input": facts.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": rows_of(shapes, "model.embed_tokens_per_layer.weight"),
        "num_kv_shared_layers": facts.count("attention.shared_kv_layers"),
        "altup_num_inputs": NUM_STREAMS,
        "altup_active_idx": facts.count("altup.active_idx"),
        "altup_correct_scale": True,
        "laurel_rank": rows_of(shapes, "model.layers.0.laurel.linear_left.weight"),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping"),
        "sliding_window": window_of(facts, shapes, config),
        "layer_types": layer_types_of(5)(facts, shapes, config),
    }


GEMMA = make_family(
    "gemma",
    "GemmaForCausalLM",
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
)
GEMMA2 = make_family(
    "gemma2",
    "Gemma2ForCausalLM",
    hidden_activation="gelu_pytorch_tanh",
    attn_logit_softcapping=number_of("attn_logit_softcapping"),
    final_logit_softcapping=number_of("final_logit_softcapping"),
    sliding_window=window_of,
    layer_types=layer_types_of(2),
    query_pre_attn_scalar=_gemma2_scale,
)
