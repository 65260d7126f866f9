"""The tower of Qwen2.5-VL: RMS norms, gated SiLU, windows in all but a few blocks.

Source: arXiv 2502.13923; transformers 5.24, models/qwen2_5_vl.
"""

from ...errors import CheckpointError
from ...layers.mlp import MLP
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
from .parts import PatchBlock, gated_activation, rms_norm

_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


class Qwen2_5VLTower:
    """Builds the tower of Qwen2.5-VL."""

    @classmethod
    def build(cls, config: Fields, weights: Weights) -> MergedTower:
        """As of `TowerFamily`."""
        vision = seeing_config(config, _DEFAULTS)
        sizes = merged_sizes(
            vision,
            hidden="hidden_size",
            out="out_hidden_size",
            window=_window(vision),
            full=vision.items("fullatt_block_indexes") or (),
        )
        blocks, joined = sizes.blocks, ("vision.merger.mlp.0", "vision.merger.mlp.2")
        return MergedTower(
            clip_conv(weights, "vision.patch_embed.proj", sizes, bias=False),
            [_block(weights, f"vision.blocks.{i}", sizes) for i in range(blocks.depth)],
            cell_merger(
                weights,
                joined,
                rms_norm(weights, "vision.merger.ln_q", blocks.hidden, blocks.eps),
                sizes,
            ),
            sizes=sizes,
            dtype=weights.dtype,
        )


def _window(vision: Fields) -> int:
    """Cells of a window's side, from its pixels."""
    pixels = vision.integer("window_size", high=2**16)
    cell = vision.integer("patch_size", high=256) * vision.integer("spatial_merge_size", high=64)
    if pixels < cell:
        raise CheckpointError(
            f"window_size in {vision.where} is {pixels} pixels; expected {cell} at least."
        )
    return pixels // cell


def _block(weights: Weights, path: str, sizes: MergedSizes) -> PatchBlock:
    blocks = sizes.blocks
    hidden, inner = blocks.hidden, blocks.inner
    names = [f"{path}.mlp.{name}_proj" for name in ("gate", "up")]
    mlp = MLP(
        weights.fused(names, [inner, inner], hidden, bias=True),
        weights.linear(f"{path}.mlp.down_proj", hidden, inner, bias=True),
        gated_activation(blocks.activation, weights.dtype),
    )
    norms = [rms_norm(weights, f"{path}.{n}", hidden, blocks.eps) for n in ("norm1", "norm2")]
    return PatchBlock(merged_attention(weights, f"{path}.attn", blocks), mlp, before=norms)
