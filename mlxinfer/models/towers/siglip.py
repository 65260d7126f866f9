"""The towers of Gemma 3 (SigLIP, pictures of one size) and of LFM2-VL (SigLIP 2, of any size).

Blocks with layer norms before attention and feed-forward, learned positions, and a last norm.
Sources: SigLIP (arXiv 2303.15343), SigLIP 2 (2502.14786), transformers 5.24: models/siglip,
models/siglip2, models/gemma3 and models/lfm2_vl.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...images import Tile
from ...layers.linear import Embedding, Linear, Projection
from ...layers.mlp import Activation
from ...layers.norm import Norm
from ..jsonfields import Fields
from ..weights.weights import Weights
from . import Features
from .parts import (
    PatchBlock,
    PatchTower,
    Project,
    Projected,
    TowerSizes,
    attention,
    layer_norm,
    linear,
    patch_conv,
    plain_mlp,
    resampled,
    rms_norm,
    text_width,
    vision_config,
)

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_LEFT_OUT = ("vision.head.", "vision.embeddings.position_ids")
_NORM_EPS = 1e-5  # of torch's layer norm


@dataclass(slots=True, eq=False)
class SiglipEmbed:
    """A projection of pixels plus learned positions."""

    proj: Projection  # (P, row) -> (P, hidden)
    table: Embedding  # one row for each place of a square of `side` x `side`
    side: int  # of the square. Other grids take means of places.

    def __call__(self, patches: mx.array, tile: Tile) -> tuple[mx.array, None]:
        places = self.table(mx.arange(self.side * self.side))
        _, rows, columns = tile.grid
        if (rows, columns) != (self.side, self.side):
            places = resized(places.reshape(self.side, self.side, -1), rows, columns)
        return self.proj(patches.astype(places.dtype)) + places, None


def resized(table: mx.array, rows: int, columns: int) -> mx.array:
    """A table (side, side, hidden) for another grid: (rows * columns, hidden).

    Bilinear, with antialiasing where the grid is smaller, corners not aligned; in float32.
    """
    side = len(table)
    whole = resampled(table, _weights(side, rows), _weights(side, columns))
    return whole.flatten(0, 1).astype(table.dtype)


def _weights(side: int, count: int) -> np.ndarray:
    """(count, side) the share of each of `side` places in each of `count`."""
    scale = np.float32(side / count)
    centres = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distances = np.abs(np.arange(side, dtype=np.float32) - centres[:, None])
    shares = np.clip(1 - distances / max(scale, np.float32(1)), 0, None)
    return shares / shares.sum(-1, keepdims=True)


@dataclass(slots=True, eq=False)
class Gemma3Project:
    """The mean of each square of patches, normed and projected."""

    last_norm: Norm  # of the tower
    tokens: int  # features of a side of the picture
    norm: Norm  # over a mean
    proj: Projection  # to the text model's width

    def __call__(self, x: mx.array, tile: Tile) -> Features:
        """A picture is a square."""
        square = tile.grid[1] // self.tokens
        x = self.last_norm(x).reshape(self.tokens, square, self.tokens, square, -1)
        return Features(self.proj(self.norm(mx.mean(x, axis=(1, 3)).flatten(0, 1))))


def gemma3_tower(config: Fields, weights: Weights) -> PatchTower:
    """SigLIP with Gemma 3's projector."""
    vision = vision_config(config)
    sizes = TowerSizes.of(vision, _DEFAULTS)
    pixels = vision.integer("patch_size", high=256, default=16)
    side = vision.integer("image_size", high=2**14, default=224) // pixels
    tokens = round(config.integer("mm_tokens_per_image", high=2**16, default=256) ** 0.5)
    if side % tokens:
        raise CheckpointError(
            f"{config.where} has {side} patches and {tokens} features on a side of a picture, "
            "which does not divide them."
        )
    proj = patch_conv(
        weights, "vision.embeddings.patch_embedding", sizes.hidden, (3, pixels, pixels)
    )
    shape = sizes.hidden, text_width(config)
    project = Gemma3Project(
        _last_norm(weights, sizes),
        tokens,
        rms_norm(weights, "projector.mm_soft_emb_norm", sizes.hidden, sizes.eps, offset=1.0),
        Linear(weights.take("projector.mm_input_projection_weight", shape).T),
    )
    return _siglip(config, weights, sizes, (proj, side), project)


def lfm2_tower(config: Fields, weights: Weights) -> PatchTower:
    """SigLIP 2 with the projector of LFM2-VL."""
    # only the weights say reliably whether the projector has a norm
    vision = vision_config(config)
    sizes = TowerSizes.of(vision, _DEFAULTS)
    pixels = vision.integer("patch_size", high=256, default=16)
    side = round(vision.integer("num_patches", high=2**20, default=256) ** 0.5)
    factor = config.integer("downsample_factor", high=64, default=2)
    path = "vision.embeddings.patch_embedding"
    proj = linear(weights, path, sizes.hidden, 3 * pixels * pixels)
    width = factor * factor * sizes.hidden
    inner = config.integer("projector_hidden_size", high=2**20, default=2560)
    paths = ("projector.linear_1", "projector.linear_2")
    activation = config.text("projector_hidden_act", default="gelu")
    squares: list[Activation] = [
        plain_mlp(weights, paths, (width, inner, text_width(config)), activation)
    ]
    if "projector.layer_norm.weight" in weights:
        squares.insert(0, layer_norm(weights, "projector.layer_norm", width, _NORM_EPS))
    project = Projected([_last_norm(weights, sizes)], factor, squares)
    return _siglip(config, weights, sizes, (proj, side), project)


def _siglip(
    config: Fields,
    weights: Weights,
    sizes: TowerSizes,
    pixels: tuple[Projection, int],
    project: Project,
) -> PatchTower:
    """`pixels`: their projection, and the places of a side of the table of positions."""
    proj, side = pixels
    path, shape = "vision.embeddings.position_embedding", (side * side, sizes.hidden)
    embed = SiglipEmbed(proj, weights.embedding(path, shape), side)
    blocks = [_block(weights, index, sizes) for index in range(sizes.depth)]
    weights.drop_below(_LEFT_OUT)
    return PatchTower(embed, blocks, project, width=text_width(config))


def _block(weights: Weights, index: int, sizes: TowerSizes) -> PatchBlock:
    path = f"vision.encoder.layers.{index}"
    names, paths = ("layer_norm1", "layer_norm2"), (f"{path}.mlp.fc1", f"{path}.mlp.fc2")
    dims = sizes.hidden, sizes.inner, sizes.hidden
    return PatchBlock(
        attention(weights, f"{path}.self_attn", sizes, output="out_proj"),
        plain_mlp(weights, paths, dims, sizes.activation),
        before=[layer_norm(weights, f"{path}.{one}", sizes.hidden, sizes.eps) for one in names],
    )


def _last_norm(weights: Weights, sizes: TowerSizes) -> Norm:
    return layer_norm(weights, "vision.post_layernorm", sizes.hidden, sizes.eps)
