"""The tower of Pixtral, and of Mistral 3 with a projector that merges patches.

A norm behind the projection of pixels, RMS norms, no biases; heads rotate by rows with their even
frequencies and by columns with the odd ones. Source: Pixtral (arXiv 2410.07073), transformers 5.24:
models/pixtral, models/mistral3 and models/llava.
"""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError
from ...images import Tile
from ...layers.linear import Projection
from ...layers.mlp import MLP
from ...layers.norm import Norm, RMSNorm
from ..jsonfields import Fields
from ..weights.weights import Weights
from . import Features
from .parts import (
    PatchBlock,
    PatchRope,
    PatchTower,
    Project,
    Projected,
    TowerSizes,
    attention,
    frequencies,
    gated_mlp,
    linear,
    patch_conv,
    patch_rope,
    plain_mlp,
    rms_norm,
    rope_theta,
    rows_and_columns,
    text_width,
    vision_config,
)

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
}


@dataclass(slots=True, eq=False)
class PixtralEmbed:
    """A projection of pixels, normed."""

    proj: Projection  # (P, row) -> (P, hidden)
    norm: RMSNorm  # behind it
    frequencies: np.ndarray  # (D / 2,) of a head

    def __call__(self, patches: mx.array, tile: Tile) -> tuple[mx.array, PatchRope]:
        """The first half of the frequencies is of rows, the second of columns."""
        rows, columns = rows_and_columns(tile.grid).T[..., None]
        angles = np.concatenate(
            [rows * self.frequencies[::2], columns * self.frequencies[1::2]], axis=-1
        )
        x = self.proj(patches.astype(self.norm.weight.dtype))
        return self.norm(x), patch_rope(angles[:, None])


@dataclass(slots=True, eq=False)
class Mistral3Project:
    """Two projections behind a norm and a projection that makes one of each square of patches."""

    norm: Norm  # over a patch
    merge: Projection  # (N, hidden * side * side) -> (N, hidden); places of a square vary fastest
    side: int  # patches of a square's side
    mlp: MLP  # the two projections

    def __call__(self, x: mx.array, tile: Tile) -> Features:
        """(P, hidden) -> (P / side / side, text hidden)."""
        _, rows, columns = tile.grid
        side = self.side
        x = self.norm(x).reshape(rows // side, side, columns // side, side, -1)
        squares = x.transpose(0, 2, 4, 1, 3).reshape(-1, side * side * x.shape[-1])
        return Features(self.mlp(self.merge(squares)))


def pixtral_tower(config: Fields, weights: Weights) -> PatchTower:
    """The tower of Pixtral-12B."""
    sizes = _sizes(config)
    return _pixtral(config, weights, sizes, Projected([_mlp(config, weights, sizes)]))


def mistral3_tower(config: Fields, weights: Weights) -> PatchTower:
    """The tower of Mistral Small 3.1 and 3.2, Ministral 3 and Devstral."""
    sizes = _sizes(config)
    side = config.integer("spatial_merge_size", high=64, default=2)
    text = config.fields("text_config") or config
    eps = text.number("rms_norm_eps", low=0.0, high=1.0, default=1e-5)
    merging = "projector.patch_merger.merging_layer"
    project = Mistral3Project(
        rms_norm(weights, "projector.norm", sizes.hidden, eps),
        linear(weights, merging, sizes.hidden, side * side * sizes.hidden),
        side,
        _mlp(config, weights, sizes),
    )
    return _pixtral(config, weights, sizes, project)


def _sizes(config: Fields) -> TowerSizes:
    """As stated; the norms' epsilon is no setting."""
    return replace(TowerSizes.of(vision_config(config), _DEFAULTS), eps=_DEFAULTS["rms_norm_eps"])


def _pixtral(config: Fields, weights: Weights, sizes: TowerSizes, project: Project) -> PatchTower:
    vision = vision_config(config)
    pixels = vision.integer("patch_size", high=256, default=16)
    embed = PixtralEmbed(
        patch_conv(weights, "vision.patch_conv", sizes.hidden, (3, pixels, pixels)),
        rms_norm(weights, "vision.ln_pre", sizes.hidden, sizes.eps),
        frequencies(rope_theta(vision, 10_000.0), sizes.head_dim),
    )
    count = _num_read(config, sizes.depth)
    blocks = [_block(weights, index, sizes) for index in range(count)]
    weights.drop_below([f"vision.transformer.layers.{i}." for i in range(count, sizes.depth)])
    return PatchTower(embed, blocks, project, width=text_width(config))


def _num_read(config: Fields, depth: int) -> int:
    stated = config.get("vision_feature_layer")
    strategy = config.text("vision_feature_select_strategy", default="full")
    layer = -1 if stated is None else stated
    if type(layer) is not int or not -depth <= layer <= depth or strategy != "full":
        raise UnsupportedModelError(
            f"vision_feature_layer is {str(stated)[:60]} and vision_feature_select_strategy "
            f"{strategy[:60]!r} in {config.where}; supported are all patches of one of {depth} "
            "blocks."
        )
    return layer if layer >= 0 else depth + 1 + layer


def _block(weights: Weights, index: int, sizes: TowerSizes) -> PatchBlock:
    path = f"vision.transformer.layers.{index}"
    names = ("attention_norm", "ffn_norm")
    return PatchBlock(
        attention(weights, f"{path}.attention", sizes),
        gated_mlp(weights, f"{path}.feed_forward", sizes),
        before=[rms_norm(weights, f"{path}.{one}", sizes.hidden, sizes.eps) for one in names],
    )


def _mlp(config: Fields, weights: Weights, sizes: TowerSizes) -> MLP:
    width, activation = text_width(config), config.text("projector_hidden_act", default="gelu")
    paths = ("projector.linear_1", "projector.linear_2")
    return plain_mlp(weights, paths, (sizes.hidden, width, width), activation)
