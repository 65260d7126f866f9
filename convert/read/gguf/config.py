"""GGUF metadata -> config.json as transformers writes it. Uses the shapes of tensors only."""

from collections.abc import Mapping
from typing import Any

from ....errors import CheckpointError
from ....models.jsonfields import Fields
from ..stored import Array
from .facts import ArchitectureFields, check_rope_dims, rope_scaling
from .families import BY_LAYER, FAMILIES, PARTIAL, gemma4_ropes


def make_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Array | None,
    label: str,
) -> dict[str, Any]:
    """config.json for a GGUF file.

    Args:
        shapes: of the tensors, by the names of transformers.
        rope_factors: the tensor that llama.cpp makes of scaled or missing frequencies, float32.

    Raises:
        CheckpointError: a key is missing or out of range.
        UnsupportedModelError: a feature that the family has not here.
    """
    facts = ArchitectureFields(metadata, label)
    family = FAMILIES[facts.architecture]
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    head_dim = facts.integer("attention.key_length", max(hidden // heads, 1))
    table = shapes.get("model.embed_tokens.weight")
    if table is None or len(table) != 2 or table[1] != hidden:
        raise CheckpointError(f"{label} has no token_embd.weight of {hidden} columns.")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if facts.architecture in BY_LAYER
        else facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": table[0],
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": facts.integer("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        **_ropes(facts, rope_factors, head_dim),
        **_token_ids(facts.all),
    }
    if ahead := facts.count("nextn_predict_layers"):
        config["num_nextn_predict_layers"] = ahead
    return config | family(facts, shapes, config)


def _ropes(facts: ArchitectureFields, factors: Array | None, head_dim: int) -> dict[str, Any]:
    if facts.architecture == "gemma4":
        return {"rope_parameters": gemma4_ropes(facts, factors)}
    found: dict[str, Any] = {
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(facts, factors, head_dim),
    }
    if facts.architecture in PARTIAL:
        dims = facts.integer("rope.dimension_count", head_dim)
        found["partial_rotary_factor"] = dims / head_dim
    elif facts.architecture != "deepseek2":
        check_rope_dims(facts, head_dim)
    return found


def _token_ids(metadata: Fields) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    names = {key: f"tokenizer.ggml.{name}_token_id" for key, name in keys.items()}
    return {
        key: metadata.integer(name, low=0)
        for key, name in names.items()
        if metadata.get(name) is not None
    }
