"""The towers of Qwen's families, of the parts in `merged.py`.

- Qwen2-VL (arXiv 2409.12191): layer norms, a quick form of GELU; patches see all of their frame.
- Qwen2.5-VL (arXiv 2502.13923): RMS norms, gated SiLU, windows in all but a few blocks.
- Qwen3-VL and Qwen 3.5 to 3.8: layer norms, GELU in its tanh form, and a table of places that is
  stretched over the picture; patches see all of their frame. Qwen3-VL makes more features from the
  outputs of some blocks. They are added after the first layers of the text model (DeepStack,
  arXiv 2406.04334).

Source: transformers 5.24, models/qwen2_vl, qwen2_5_vl, qwen3_vl and qwen3_5.
"""

from collections.abc import Sequence
from math import isqrt

from ...errors import CheckpointError
from ...layers.linear import Projection
from ...layers.mlp import MLP, gated
from ...layers.norm import Norm
from ..jsonfields import Fields
from ..weights.weights import Weights
from .merged import (
    CellMerger,
    MergedSizes,
    MergedTower,
    PlaceTable,
    cell_merger,
    merged_attention,
    merged_sizes,
    seeing_config,
)
from .parts import PatchBlock, layer_norm, patch_conv, plain_mlp, rms_norm

_SHARED = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2 = {
    **_SHARED,
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "patch_size": 14,
}
_QWEN2_5 = {
    **_SHARED,
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3 = {
    **_SHARED,
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}


def qwen2_vl_tower(config: Fields, weights: Weights) -> MergedTower:
    """The tower of Qwen2-VL, whose config calls its own width `embed_dim`."""
    vision = seeing_config(config, _QWEN2)
    ratio = vision.number("mlp_ratio", above=0.0, high=64)
    inner = int(vision.integer("embed_dim", high=2**16) * ratio)
    sizes = merged_sizes(vision, hidden="embed_dim", out="hidden_size", inner=inner)
    blocks = [_plain_block(weights, i, sizes, ("fc1", "fc2")) for i in _depth(sizes)]
    norm = layer_norm(weights, "vision.merger.ln_q", sizes.blocks.hidden, sizes.blocks.eps)
    return _without_places(weights, sizes, blocks, norm)


def qwen2_5_vl_tower(config: Fields, weights: Weights) -> MergedTower:
    """The tower of Qwen2.5-VL."""
    vision = seeing_config(config, _QWEN2_5)
    sizes = merged_sizes(
        vision,
        hidden="hidden_size",
        out="out_hidden_size",
        window=_window(vision),
        full=vision.items("fullatt_block_indexes") or (),
    )
    blocks = [_gated_block(weights, f"vision.blocks.{i}", sizes) for i in _depth(sizes)]
    norm = rms_norm(weights, "vision.merger.ln_q", sizes.blocks.hidden, sizes.blocks.eps)
    return _without_places(weights, sizes, blocks, norm)


def _window(vision: Fields) -> int:
    pixels = vision.integer("window_size", high=2**16)
    side = vision.integer("spatial_merge_size", high=64)
    cell = vision.integer("patch_size", high=256) * side
    if pixels < cell:
        raise CheckpointError(
            f"window_size in {vision.where} is {pixels} pixels; expected {cell} at least."
        )
    return pixels // cell


def _gated_block(weights: Weights, path: str, sizes: MergedSizes) -> PatchBlock:
    blocks = sizes.blocks
    hidden, inner = blocks.hidden, blocks.inner
    names = [f"{path}.mlp.{name}_proj" for name in ("gate", "up")]
    mlp = MLP(
        weights.fused(names, [inner, inner], hidden, bias=True),
        weights.linear(f"{path}.mlp.down_proj", hidden, inner, bias=True),
        gated(blocks.activation, weights.dtype),
    )
    norms = [rms_norm(weights, f"{path}.{n}", hidden, blocks.eps) for n in ("norm1", "norm2")]
    return PatchBlock(merged_attention(weights, f"{path}.attn", blocks), mlp, before=norms)


def qwen3_vl_tower(
    config: Fields, weights: Weights, *, deep: Sequence[int] = (8, 16, 24)
) -> MergedTower:
    """The tower with DeepStack of Qwen3-VL and Qwen3-VL-MoE.

    Args:
        deep: blocks behind which more features are taken, unless the config states others.
    """
    vision = seeing_config(config, _QWEN3)
    sizes = merged_sizes(vision, hidden="hidden_size", out="out_hidden_size")
    return MergedTower(
        _patch_conv(weights, sizes),
        [_plain_block(weights, i, sizes, ("linear_fc1", "linear_fc2")) for i in _depth(sizes)],
        _merger(weights, "vision.merger", sizes),
        sizes=sizes,
        dtype=weights.dtype,
        places=_places(weights, vision, sizes.blocks.hidden),
        deep=_deep(weights, vision, sizes, deep),
    )


def qwen3_5_tower(config: Fields, weights: Weights) -> MergedTower:
    """The tower of Qwen 3.5 to 3.8, which has no DeepStack unless its config says so."""
    return qwen3_vl_tower(config, weights, deep=())


def _deep(
    weights: Weights, vision: Fields, sizes: MergedSizes, default: Sequence[int]
) -> dict[int, CellMerger]:
    stated = vision.items("deepstack_visual_indexes")
    indices = list(default) if stated is None else stated
    known = _depth(sizes)
    if len(set(indices)) < len(indices) or not all(i in known for i in indices):
        raise CheckpointError(
            f"deepstack_visual_indexes in {vision.where} is {indices}; expected numbers of "
            f"{sizes.blocks.depth} blocks."
        )
    paths = [f"vision.deepstack_merger_list.{number}" for number in range(len(indices))]
    mergers = [_merger(weights, path, sizes, of_cells=True) for path in paths]
    return dict(zip(indices, mergers, strict=True))


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


def _depth(sizes: MergedSizes) -> range:
    return range(sizes.blocks.depth)


def _patch_conv(weights: Weights, sizes: MergedSizes) -> Projection:
    return patch_conv(weights, "vision.patch_embed.proj", sizes.blocks.hidden, sizes.row)


def _plain_block(
    weights: Weights, index: int, sizes: MergedSizes, names: tuple[str, str]
) -> PatchBlock:
    """A block with layer norms and a feed-forward block without a gate, of matrices `names`."""
    blocks, path = sizes.blocks, f"vision.blocks.{index}"
    paths = [f"{path}.mlp.{name}" for name in names]
    return PatchBlock(
        merged_attention(weights, f"{path}.attn", blocks),
        plain_mlp(weights, paths, (blocks.hidden, blocks.inner, blocks.hidden), blocks.activation),
        before=[
            layer_norm(weights, f"{path}.{name}", blocks.hidden, blocks.eps)
            for name in ("norm1", "norm2")
        ],
    )


def _without_places(
    weights: Weights, sizes: MergedSizes, blocks: list[PatchBlock], norm: Norm
) -> MergedTower:
    names = "vision.merger.mlp.0", "vision.merger.mlp.2"
    return MergedTower(
        _patch_conv(weights, sizes),
        blocks,
        cell_merger(weights, names, norm, sizes),
        sizes=sizes,
        dtype=weights.dtype,
    )
