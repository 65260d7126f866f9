"""Rotary embeddings as GGUF files state them -> rope_scaling of config.json. Knows no tensors."""

from typing import Any

import numpy as np

from ....errors import CheckpointError, UnsupportedModelError
from ..stored import Array
from .facts import Facts


def check_rope_dims(facts: Facts, head_dim: int) -> None:
    """Raise UnsupportedModelError where a head is turned in part."""
    dims = facts.integer("rope.dimension_count", head_dim)
    if dims != head_dim:
        raise UnsupportedModelError(
            f"{facts.all.where} turns {dims} of {head_dim} dimensions; expected all of them."
        )


def rope_scaling(facts: Facts, factors: Array | None, head_dim: int) -> dict[str, Any] | None:
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


def _llama3_scaling(facts: Facts, factors: Array, head_dim: int) -> dict[str, Any] | None:
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
