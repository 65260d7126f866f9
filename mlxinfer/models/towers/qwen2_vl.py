"""The tower of Qwen2-VL: layer norms, a quick form of GELU, patches that see all of their frame.

Source: arXiv 2409.12191; transformers 5.24, models/qwen2_vl.
"""

from ..jsonfields import Fields
from ..weights.weights import Weights
from .merged import (
    MergedSizes,
    MergedTower,
    cell_merger,
    clip_conv,
    merged_attention,
    merged_sizes,
    seeing_config,
)
from .parts import PatchBlock, layer_norm, plain_mlp

_DEFAULTS = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


class Qwen2VLTower:
    """Builds the tower of Qwen2-VL, whose config calls its own width `embed_dim`."""

    @classmethod
    def build(cls, config: Fields, weights: Weights) -> MergedTower:
        """As of `TowerFamily`."""
        vision = seeing_config(config, _DEFAULTS)
        inner = int(
            vision.integer("embed_dim", high=2**16) * vision.number("mlp_ratio", above=0.0, high=64)
        )
        sizes = merged_sizes(vision, hidden="embed_dim", out="hidden_size", inner=inner)
        blocks, joined = sizes.blocks, ("vision.merger.mlp.0", "vision.merger.mlp.2")
        return MergedTower(
            clip_conv(weights, "vision.patch_embed.proj", sizes, bias=False),
            [_block(weights, f"vision.blocks.{i}", sizes) for i in range(blocks.depth)],
            cell_merger(
                weights,
                joined,
                layer_norm(weights, "vision.merger.ln_q", blocks.hidden, blocks.eps),
                sizes,
            ),
            sizes=sizes,
            dtype=weights.dtype,
        )


def _block(weights: Weights, path: str, sizes: MergedSizes) -> PatchBlock:
    blocks = sizes.blocks
    return PatchBlock(
        merged_attention(weights, f"{path}.attn", blocks),
        plain_mlp(weights, f"{path}.mlp", blocks),
        before=[
            layer_norm(weights, f"{path}.{name}", blocks.hidden, blocks.eps)
            for name in ("norm1", "norm2")
        ],
    )
