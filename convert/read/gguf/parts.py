"""Parts of configs that several architectures share: experts, layers with windows."""

from collections.abc import Callable, Mapping
from typing import Any

from ....errors import CheckpointError
from .fields import ArchitectureFields

KINDS = ("sliding_attention", "full_attention")
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
Shapes = Mapping[str, tuple[int, ...]]  # of the tensors, by the names of transformers
Config = dict[str, Any]
FamilyValue = Callable[[ArchitectureFields, Shapes, Config], Any]
FamilyConfig = Callable[[ArchitectureFields, Shapes, Config], Config]


def make_family(model_type: str, architecture: str, **more: Any) -> FamilyConfig:
    """A family that says what most say: a function of each of `more`'s entries, or its value."""

    def make(facts: ArchitectureFields, shapes: Shapes, config: Config) -> Config:
        made: Config = {
            "model_type": model_type,
            "architectures": [architecture],
            "hidden_act": "silu",
            "attention_bias": has_biases(shapes),
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in shapes,
        }
        if "intermediate_size" not in more:
            made["intermediate_size"] = facts.integer("feed_forward_length", 1)
        for key, value in more.items():
            made[key] = value(facts, shapes, config) if callable(value) else value
        return made

    return make


def has_biases(shapes: Shapes) -> bool:
    return "model.layers.0.self_attn.q_proj.bias" in shapes


def has(name: str) -> FamilyValue:
    return lambda facts, shapes, config: f"model.layers.0.{name}" in shapes


def rows_in(name: str, axis: int = 0) -> FamilyValue:
    return lambda facts, shapes, config: rows_of(shapes, f"model.layers.0.{name}", axis)


def norm_eps(facts: ArchitectureFields, shapes: Shapes, config: Config) -> float:
    return float(config["layer_norm_eps"])


def number_of(key: str, default: float | None = None) -> FamilyValue:
    return lambda facts, shapes, config: facts.number(key, default)


def layer_types_of(period: int) -> FamilyValue:
    """Kinds of layers; where the file has no list, the last of each period sees everything."""

    def make(facts: ArchitectureFields, shapes: Shapes, config: Config) -> list[str]:
        count = config["num_hidden_layers"]
        slides = facts.by_layer_or_none("attention.sliding_window_pattern", count)
        if slides is None:
            period_here = facts.integer("attention.sliding_window_pattern", period)
            slides = [int((index + 1) % period_here != 0) for index in range(count)]
        return [KINDS[0] if flag else KINDS[1] for flag in slides]

    return make


def window_of(facts: ArchitectureFields, shapes: Shapes, config: Config) -> int | None:
    return facts.count("attention.sliding_window") or None


def multipliers_of(facts: ArchitectureFields, head_dim: int) -> Config:
    return {
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "attention_multiplier": facts.number("attention.scale", head_dim**-0.5),
    }


def ministral_ropes(facts: ArchitectureFields, config: Config, **more: float) -> Config:
    """YaRN with fields of `more`, and how queries grow: 0.1 where a file does not say it.

    That is what the published models have; the converter leaves it out of Mistral Small 4's files.
    """
    ropes = {
        **(config["rope_scaling"] or {"rope_type": "default"}),
        "rope_theta": config["rope_theta"],
        "llama_4_scaling_beta": facts.number("attention.temperature_scale", 0.1),
        **more,
    }
    return {"rope_parameters": ropes, "rope_scaling": None}


def rows_of(shapes: Shapes, name: str, axis: int = 0) -> int:
    if name not in shapes:
        raise CheckpointError(f"The file has no tensor for {name}.")
    return shapes[name][axis]


def experts_of(
    facts: ArchitectureFields,
    *,
    count: str = "num_experts",
    per_token: str = "num_experts_per_tok",
    size: str = "moe_intermediate_size",
) -> Config:
    """A mixture of experts under a family's keys; without `size` experts are as wide as layers."""
    made = {count: facts.integer("expert_count"), per_token: facts.integer("expert_used_count")}
    return made | ({size: facts.integer("expert_feed_forward_length")} if size else {})


def routing_of(facts: ArchitectureFields) -> Config:
    return {
        **experts_of(facts, count="n_routed_experts"),
        "n_shared_experts": facts.integer("expert_shared_count"),
        "first_k_dense_replace": facts.count("leading_dense_block_count"),
        "n_group": facts.integer("expert_group_count", 1),
        "topk_group": facts.integer("expert_group_used_count", 1),
        "norm_topk_prob": facts.flag("expert_weights_norm"),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }
