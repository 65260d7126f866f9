"""The tower of Qwen3-VL and of Qwen 3.5 to 3.8.

Layer norms, a table of places that is stretched over the picture, GELU in its tanh form, all
patches of a frame see each other. Qwen3-VL takes more features behind some of its blocks, which are
added after the first layers of the text model (DeepStack, arXiv 2406.04334).
Source: transformers 5.24, models/qwen3_vl and models/qwen3_5.
"""

from math import isqrt

from ...errors import CheckpointError
from ...layers.mlp import MLP
from ..jsonfields import Fields
from ..weights.weights import Weights
from .merged import (
    CellMerger,
    MergedSizes,
    MergedTower,
    PlaceTable,
    cell_merger,
    clip_conv,
    merged_attention,
    merged_sizes,
    seeing_config,
)
from .parts import PatchBlock, layer_norm, plain_activation

_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}


class Qwen3VLTower:
    """Builds the tower with DeepStack: Qwen3-VL and Qwen3-VL-MoE."""

    deep_default: tuple[int, ...] = (8, 16, 24)

    @classmethod
    def build(cls, config: Fields, weights: Weights) -> MergedTower:
        """As of `TowerFamily`."""
        vision = seeing_config(config, _DEFAULTS)
        sizes = merged_sizes(vision, hidden="hidden_size", out="out_hidden_size")
        return MergedTower(
            clip_conv(weights, "vision.patch_embed.proj", sizes, bias=True),
            [_block(weights, f"vision.blocks.{i}", sizes) for i in range(sizes.blocks.depth)],
            _merger(weights, "vision.merger", sizes),
            sizes=sizes,
            dtype=weights.dtype,
            places=_places(weights, vision, sizes.blocks.hidden),
            deep=cls._deep(weights, vision, sizes),
        )

    @classmethod
    def _deep(cls, weights: Weights, vision: Fields, sizes: MergedSizes) -> dict[int, CellMerger]:
        """Mergers of DeepStack by the block that they follow."""
        stated = vision.items("deepstack_visual_indexes")
        indices = list(cls.deep_default) if stated is None else stated
        known = range(sizes.blocks.depth)
        if len(set(indices)) < len(indices) or not all(i in known for i in indices):
            raise CheckpointError(
                f"deepstack_visual_indexes in {vision.where} is {indices}; expected numbers of "
                f"{sizes.blocks.depth} blocks."
            )
        return {
            index: _merger(weights, f"vision.deepstack_merger_list.{number}", sizes, of_cells=True)
            for number, index in enumerate(indices)
        }


class Qwen3_5Tower(Qwen3VLTower):
    """Builds the tower of Qwen 3.5 to 3.8, which has no DeepStack unless its config says so."""

    deep_default = ()


def _block(weights: Weights, path: str, sizes: MergedSizes) -> PatchBlock:
    blocks = sizes.blocks
    hidden, inner = blocks.hidden, blocks.inner
    mlp = MLP(
        weights.linear(f"{path}.mlp.linear_fc1", inner, hidden, bias=True),
        weights.linear(f"{path}.mlp.linear_fc2", hidden, inner, bias=True),
        plain_activation(blocks.activation),
    )
    norms = [layer_norm(weights, f"{path}.{n}", hidden, blocks.eps) for n in ("norm1", "norm2")]
    return PatchBlock(merged_attention(weights, f"{path}.attn", blocks), mlp, before=norms)


def _merger(
    weights: Weights, path: str, sizes: MergedSizes, *, of_cells: bool = False
) -> CellMerger:
    width = sizes.blocks.hidden * (sizes.cell if of_cells else 1)
    norm = layer_norm(weights, f"{path}.norm", width, sizes.blocks.eps)
    names = f"{path}.linear_fc1", f"{path}.linear_fc2"
    return cell_merger(weights, names, norm, sizes, of_cells=of_cells)


def _places(weights: Weights, vision: Fields, hidden: int) -> PlaceTable:
    count = vision.integer("num_position_embeddings", high=2**20)
    side = isqrt(count)
    if side * side != count:
        raise CheckpointError(
            f"num_position_embeddings in {vision.where} is {count}; expected a square."
        )
    table = weights.take("vision.pos_embed.weight", (count, hidden))
    return PlaceTable(table.reshape(side, side, hidden))
