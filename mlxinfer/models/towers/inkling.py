"""The tower of Inkling 2: a class token before the patches, layer scales, 2 x 2 patches a feature.

Heads rotate in neighbouring pairs, by columns with the first half of them and by rows with the
second; places count from 1, and the class token has place 0. Source: transformers 5.24,
models/inkling2.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...images import Tile
from ...layers.linear import Projection
from ...layers.norm import LayerNorm
from ...layers.rope import rotary_order
from ..jsonfields import Fields
from ..weights.weights import Weights
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
    nearness,
    patch_rope,
    plain_mlp,
    resampled,
    rope_theta,
    rows_and_columns,
    text_width,
    vision_config,
)

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}


class TowerNames(NamedTuple):
    """Paths of modules: of layers and embeddings, the first norm, both projections; in a layer."""

    body: str
    norm: str
    projections: tuple[str, str]
    norms: tuple[str, str]
    mlp: tuple[str, str]
    scales: tuple[str, str]


PUBLISHED = TowerNames(
    "vision.backbone", "vision.backbone.ln_pre", ("vision.proj_in", "vision.proj_out"),
    ("ln_1", "ln_2"), ("c_fc", "c_proj"), ("ls_1.gamma", "ls_2.gamma"),
)  # fmt: skip
MODULES = TowerNames(
    "vision", "vision.pre_layernorm", ("vision.merger.linear_1", "vision.merger.linear_2"),
    ("layernorm_before", "layernorm_after"), ("fc1", "fc2"),
    ("lambda_1", "lambda_2"),
)  # fmt: skip


@dataclass(slots=True, eq=False)
class LayerScale:
    """Multiplies the output of a block by a weight for each number."""

    weight: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.weight


@dataclass(slots=True, eq=False)
class InklingEmbed:
    """Pixels and a place for each patch behind a class token, normed."""

    proj: Projection  # (P, row) -> (P, hidden)
    places: mx.array  # (side, side, hidden), stretched over the patches of a picture
    first: mx.array  # (1, hidden) the class token
    norm: LayerNorm  # over all of them
    frequencies: NDArray[np.float64]  # (D / 4,) of rows, and of columns

    def __call__(self, patches: mx.array, tile: Tile) -> tuple[mx.array, PatchRope]:
        """(1 + P, hidden), the class token first."""
        _, rows, columns = tile.grid
        x = self.proj(patches.astype(self.first.dtype))
        side = len(self.places)
        places = resampled(self.places, _centred(side, rows), _centred(side, columns))
        x = x + places.reshape(x.shape).astype(x.dtype)
        at = np.concatenate([[[0, 0]], rows_and_columns(tile.grid) + 1])  # (1 + P, 2)
        angles = np.concatenate(
            [at[:, 1:] * self.frequencies, at[:, :1] * self.frequencies], axis=-1
        )
        return self.norm(mx.concatenate([self.first, x])), patch_rope(angles[:, None])


def _centred(places: int, count: int) -> np.ndarray:
    """(count, places) weights of places for points that are the middles of equal parts."""
    at = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * np.float32(places / count)
    return nearness((at - np.float32(0.5)).clip(0, places - 1), places)


def without_first(x: mx.array) -> mx.array:
    """(1 + P, hidden) -> (P, hidden), without the class token."""
    return x[1:]


def inkling_tower(config: Fields, weights: Weights) -> PatchTower:
    """The tower of Inkling 2 Mini."""
    vision, width = vision_config(config), text_width(config)
    sizes = TowerSizes.of(vision, _DEFAULTS)
    side = vision.integer("spatial_merge_size", "adapter_merge_size", high=64, default=2)
    inner = vision.integer("projection_hidden_dim", high=2**20, default=4096)
    names = MODULES if f"{MODULES.norm}.weight" in weights else PUBLISHED
    dims = side * side * sizes.hidden, inner, width
    mlp = plain_mlp(weights, names.projections, dims, sizes.activation)
    paths = [f"{names.body}.layers.{i}" for i in range(sizes.depth)]
    blocks = [_block(weights, path, sizes, names) for path in paths]
    embed = _embed(vision, weights, sizes, names)
    return PatchTower(embed, blocks, Projected([without_first], side, [mlp]), width=width)


def _embed(vision: Fields, weights: Weights, sizes: TowerSizes, names: TowerNames) -> InklingEmbed:
    path, hidden = f"{names.body}.embeddings", sizes.hidden
    patch = vision.integer("patch_size", "native_patch_size", high=256, default=20)
    side = vision.integer("posemb_grid_size", high=2**10, default=32)
    where, shape = f"{path}.position_embedding", (side * side, hidden)
    if f"{where}.weight" in weights:
        places = weights.embedding(where, shape)(mx.arange(side * side))
    else:
        places = weights.take(where, shape)
    first = sum(
        weights.take(f"{path}.{name}", (hidden,))
        for name in ("class_embedding", "cls_position_embedding")
    )
    return InklingEmbed(
        linear(weights, f"{path}.patch_embedding", hidden, 3 * patch * patch),
        places.reshape(side, side, -1),
        mx.array(first)[None],
        layer_norm(weights, names.norm, hidden, sizes.eps),
        frequencies(rope_theta(vision, 10_000.0), sizes.head_dim // 2),
    )


def _block(weights: Weights, path: str, sizes: TowerSizes, names: TowerNames) -> PatchBlock:
    hidden, heads, dim = sizes.hidden, sizes.heads, sizes.head_dim
    order = rotary_order(heads, 0, dim, dim)
    qkv = weights.fused(
        [f"{path}.self_attn.{name}_proj" for name in "qkv"],
        [hidden] * 3,
        hidden,
        bias=True,
        orders=[order, order, None],
    )
    paths = [f"{path}.mlp.{name}" for name in names.mlp]
    return PatchBlock(
        PatchAttention(
            qkv,
            linear(weights, f"{path}.self_attn.out_proj", hidden, hidden),
            heads=(heads, heads),
            scale=dim**-0.5,
        ),
        plain_mlp(weights, paths, (hidden, sizes.inner, hidden), sizes.activation),
        before=[layer_norm(weights, f"{path}.{one}", hidden, sizes.eps) for one in names.norms],
        after=[LayerScale(weights.take(f"{path}.{one}", (hidden,))) for one in names.scales],
    )
