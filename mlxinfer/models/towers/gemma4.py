"""The towers of Gemma 4, and the embedding of pixels that the 12B model has in place of a tower.

Sandwich norms, queries and keys normed by head, values without weights, scores that are not scaled;
heads rotate by column in their first half and by row in the other. Nine patches become one feature.
Some checkpoints limit what goes in and out of each projection; some standardise the features.
Source: transformers 5.24, models/gemma4 and models/gemma4_unified.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import mlx.core as mx
import numpy as np

from ...errors import PictureError
from ...images import Tile
from ...layers.linear import Joined, Projection
from ...layers.mlp import MLP, gated
from ...layers.norm import LayerNorm, Norm, RMSNorm
from ..jsonfields import Fields
from ..weights.weights import Weights
from . import Features
from .parts import (
    PatchAttention,
    PatchBlock,
    PatchRope,
    PatchTower,
    Projected,
    TowerSizes,
    frequencies,
    layer_norm,
    linear,
    patch_rope,
    rms_norm,
    rope_theta,
    rows_and_columns,
    text_width,
    vision_config,
)

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
_LIMITS = ("input_min", "input_max", "output_min", "output_max")
_NORM_EPS = 1e-5  # of torch's layer norm


class ClippedLinear(Projection):
    """A projection with limits of its inputs and of its outputs.

    Args:
        limits: least and largest input, least and largest output, () each.
    """

    __slots__ = ("inner", "limits")

    def __init__(self, inner: Projection, limits: Sequence[mx.array]) -> None:
        self.inner = inner
        self.limits = tuple(limits)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        y = mx.clip(self.inner(mx.clip(x, *self.limits[:2])), *self.limits[2:])
        return y if residual is None else y + residual


@dataclass(slots=True, eq=False)
class Gemma4Embed:
    """A projection of pixels, plus the table's rows for the column and for the row of a patch."""

    proj: Projection  # (P, 3 * side * side) -> (P, hidden)
    table: mx.array  # (2, places, hidden) for columns and for rows
    frequencies: np.ndarray  # (D / 4,) of either half of a head

    def __call__(self, patches: mx.array, tile: Tile) -> tuple[mx.array, PatchRope]:
        """Pixels are from 0 to 1 and become -1 to 1."""
        places = _places(tile, self.table.shape[1])[:, ::-1]  # (P, 2) column and row
        rope = patch_rope(places[..., None] * self.frequencies)  # two parts: columns and rows
        columns, rows = (mx.array(places[:, axis]) for axis in range(2))
        x = self.proj((2 * patches - 1).astype(self.table.dtype))
        return x + self.table[0][columns] + self.table[1][rows], rope


def _places(tile: Tile, count: int) -> np.ndarray:
    """(P, 2) the row and the column of each patch; both have tables of `count` places."""
    if (longest := max(tile.grid[1:])) > count:
        raise PictureError(
            f"A picture has {longest} patches in a row or a column, and this model knows {count} "
            "places; use a picture that is less long."
        )
    return rows_and_columns(tile.grid)


@dataclass(slots=True, eq=False)
class Gemma4Project:
    """The mean of each square of patches, scaled and perhaps standardised, then projected."""

    side: int  # patches of a square's side
    standard: mx.array | None  # (2, hidden) what is subtracted, and then a factor; None: neither
    norm: RMSNorm  # of eps alone, without weights
    proj: Projection  # to the text model's width

    def __call__(self, x: mx.array, tile: Tile) -> Features:
        """The scale is beyond float16, so it is float32 up to the norm."""
        _, rows, columns = tile.grid
        side, hidden = self.side, x.shape[-1]
        squares = x.reshape(-1, rows // side, side, columns // side, side, hidden)
        pooled = mx.mean(squares.astype(mx.float32), axis=(2, 4)).reshape(-1, hidden)
        pooled = pooled * hidden**0.5
        if self.standard is not None:
            bias, scale = self.standard
            pooled = (pooled - bias) * scale
        return Features(self.proj(self.norm(pooled.astype(x.dtype))))


def gemma4_tower(config: Fields, weights: Weights) -> PatchTower:
    """The towers of E2B, E4B, 26B-A4B and 31B."""
    vision = vision_config(config)
    sizes = TowerSizes.of(vision, _DEFAULTS)
    places = vision.integer("position_embedding_size", high=2**20, default=10_240)
    table = weights.take(
        "vision.patch_embedder.position_embedding_table", (2, places, sizes.hidden)
    )
    path, row = "vision.patch_embedder.input_proj", 3 * _patch_size(vision) ** 2
    embed = Gemma4Embed(
        linear(weights, path, sizes.hidden, row),
        table,
        frequencies(rope_theta(vision, 100.0), sizes.head_dim // 2),
    )
    limited = vision.boolean("use_clipped_linears", default=False)
    blocks = [_block(weights, i, sizes, limited=limited) for i in range(sizes.depth)]
    project = _project(config, vision, weights, sizes)
    return PatchTower(embed, blocks, project, width=text_width(config))


def gemma4_unified_tower(config: Fields, weights: Weights) -> PatchTower:
    """What the 12B model has: norms and a projection of squares of 48 pixels."""
    vision = vision_config(config)
    hidden = vision.integer("mm_embed_dim", high=2**16, default=3840)
    row = 3 * (_patch_size(vision) * _pooled(vision)) ** 2
    places = vision.integer("mm_posemb_size", high=2**20, default=1120)
    embed = UnifiedEmbed(
        linear(weights, "vision.patch_dense", hidden, row),
        weights.take("vision.pos_embedding", (places, 2, hidden)),
        norms=[
            PixelNorm(layer_norm(weights, "vision.patch_ln1", row, _NORM_EPS)),
            layer_norm(weights, "vision.patch_ln2", hidden, _NORM_EPS),
            layer_norm(weights, "vision.pos_norm", hidden, _NORM_EPS),
        ],
    )
    project = Projected(_projection(config, vision, weights, hidden))
    return PatchTower(embed, [], project, width=text_width(config))


@dataclass(slots=True, eq=False)
class PixelNorm:
    """A layer norm of the pixels of squares, in float32 up to the weights.

    Squares of sky or paper hardly vary around a bright mean. There MLX's own norm of 6,912 numbers
    is off by 1e-2 of their spread: the rounding of the mean is not small beside it. So the mean is
    subtracted before squares are summed, and sums are those of parts.
    """

    norm: LayerNorm  # weights, bias and eps

    def __call__(self, pixels: mx.array) -> mx.array:
        """(P, 3 * side * side) to the same shape."""
        centred = pixels - _mean(pixels)
        centred = centred - _mean(centred)  # the first mean was rounded
        x = centred * mx.rsqrt(_mean(centred * centred) + self.norm.eps)
        assert self.norm.bias is not None
        return x * self.norm.weight + self.norm.bias


def _mean(x: mx.array) -> mx.array:
    """(P, 3 * side * side) -> (P, 1), as a mean of means: long sums lose digits."""
    lines = x.reshape(len(x), isqrt(x.shape[-1] // 3), -1)  # (P, side, 3 * side)
    return mx.mean(mx.mean(lines, axis=-1), axis=-1, keepdims=True)


class UnifiedEmbed:
    """Norm, projection, norm, plus two rows of a table, norm.

    Args:
        proj: (P, 3 * side * side) -> (P, hidden).
        table: (places, 2, hidden) for columns and for rows.
        norms: in this order.
    """

    __slots__ = ("norms", "proj", "table")

    def __init__(self, proj: Projection, table: mx.array, *, norms: Sequence[Norm]) -> None:
        self.proj = proj
        self.table = table
        self.norms = tuple(norms)

    def __call__(self, patches: mx.array, tile: Tile) -> tuple[mx.array, None]:
        """Pixels stay from 0 to 1."""
        before, between, after = self.norms
        rows, columns = (mx.array(one) for one in _places(tile, self.table.shape[0]).T)
        x = between(self.proj(before(patches).astype(self.table.dtype)))
        return after(x + self.table[columns, 0] + self.table[rows, 1]), None


def _block(weights: Weights, index: int, sizes: TowerSizes, *, limited: bool) -> PatchBlock:
    path = f"vision.encoder.layers.{index}"
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim

    def joined(front: str, names: Sequence[str], out_dims: Sequence[int], width: int) -> Projection:
        paths = [f"{path}.{front}.{name}_proj" for name in names]
        if not limited:
            return weights.fused([f"{one}.linear" for one in paths], out_dims, width)
        parts = [_clipped(weights, *one, width) for one in zip(paths, out_dims, strict=True)]
        return parts[0] if len(parts) == 1 else Joined(parts)

    attention = PatchAttention(
        joined("self_attn", "qkv", [heads * dim, kv_heads * dim, kv_heads * dim], sizes.hidden),
        joined("self_attn", "o", [sizes.hidden], heads * dim),
        heads=(heads, kv_heads),
        scale=1.0,
        norms=[
            *(rms_norm(weights, f"{path}.self_attn.{one}_norm", dim, sizes.eps) for one in "qk"),
            RMSNorm(mx.ones(dim, weights.dtype), sizes.eps),
        ],
    )
    mlp = MLP(
        joined("mlp", ("gate", "up"), [sizes.inner, sizes.inner], sizes.hidden),
        joined("mlp", ("down",), [sizes.hidden], sizes.inner),
        gated(sizes.activation, weights.dtype),
    )
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    norms = [rms_norm(weights, f"{path}.{one}_layernorm", sizes.hidden, sizes.eps) for one in names]
    return PatchBlock(attention, mlp, before=norms[::2], after=norms[1::2])


def _clipped(weights: Weights, path: str, out_dims: int, in_dims: int) -> ClippedLinear:
    limits = [weights.take(f"{path}.{name}", ()) for name in _LIMITS]
    return ClippedLinear(linear(weights, f"{path}.linear", out_dims, in_dims), limits)


def _project(config: Fields, vision: Fields, weights: Weights, sizes: TowerSizes) -> Gemma4Project:
    standard = None
    if vision.boolean("standardize", default=False):
        both = [weights.raw(f"vision.std_{one}", (sizes.hidden,)) for one in ("bias", "scale")]
        standard = mx.stack(both).astype(mx.float32)
    projection = _projection(config, vision, weights, sizes.hidden)
    return Gemma4Project(_pooled(vision), standard, *projection)


def _projection(
    config: Fields, vision: Fields, weights: Weights, width: int
) -> tuple[RMSNorm, Projection]:
    eps = vision.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6)
    path = "projector.embedding_projection"
    proj = linear(weights, path, text_width(config), width)
    return RMSNorm(mx.ones(width, weights.dtype), eps), proj


def _patch_size(vision: Fields) -> int:
    return vision.integer("patch_size", high=256, default=16)


def _pooled(vision: Fields) -> int:
    return vision.integer("pooling_kernel_size", high=64, default=3)
