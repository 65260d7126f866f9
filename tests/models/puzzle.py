"""A tiny Nemotron whose layers of experts have sizes of their own."""

from typing import Any

import mlx.core as mx
from models.tiny import arrays_of, tiny_config

FEW = {"n_routed_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2} | {
    "n_group": 2,
    "topk_group": 1,
}
KINDS = ("mamba", "moe", "mamba", "attention", "moe", "mlp")


def puzzle() -> tuple[dict[str, Any], dict[str, mx.array]]:
    """A config and tensors: nemotron_h-v5 with fewer and smaller experts in layer 1."""
    blocks: list[dict[str, Any]] = [{"block_type": k, "moe_latent_size": None} for k in KINDS]
    blocks[1] |= FEW
    config = {**tiny_config("nemotron_h-v5"), "block_configs": blocks}
    del config["layers_block_type"]
    tensors = with_fewer_experts(arrays_of(tiny_config("nemotron_h-v5")), 1)
    return {**config, "model_type": "nemotron_h_puzzle"}, tensors


def with_fewer_experts(tensors: dict[str, mx.array], layer: int) -> dict[str, mx.array]:
    """The first experts of a layer, each with the first of its inner numbers."""
    count, inner = FEW["n_routed_experts"], FEW["moe_intermediate_size"]
    result, path = {}, f"layers.{layer}.mixer."
    for name, array in tensors.items():
        inside = name.partition(path)[2]
        if inside.startswith("experts."):
            if int(inside.split(".")[1]) >= count:
                continue
            array = array[:inner] if "up_proj" in inside else array[:, :inner]
        elif inside.startswith("gate."):
            array = array[:count]
        result[name] = array
    return result
