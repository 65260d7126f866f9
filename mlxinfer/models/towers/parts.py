"""Parts of towers: attention of all patches of a tile to all, blocks, and the pass itself.

P = patches of a tile, H = heads, D = numbers of a head. No array here is (P, P): where MLX's
attention would keep scores, it is given few queries at a time.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...images import Tile
from ...layers.linear import Linear, Projection
from ...layers.mlp import MLP, Activation, FeedForward, gated, plain
from ...layers.norm import LayerNorm, Norm, RMSNorm
from ...metal_kernels.chips import FUSED_DIMS
from ..jsonfields import Fields
from ..language import arrays
from ..weights.weights import Weights
from . import Features

MAX_SCORES = 1 << 20  # numbers that attention keeps at once where it is not fused
MAX_PRODUCTS = 5 * 10**10  # multiplications of attention in one piece of a pass
MAX_ROWS = 2048  # patches that go through a feed-forward block at once


class PatchRope(NamedTuple):
    """Cosines and sines by which the heads of each patch rotate.

    A head consists of some parts of equal size. In each of them, number i rotates with number
    i + size / 2.

    Attributes:
        cos, sin: (P, 1, parts, D / parts / 2) float32.
    """

    cos: mx.array
    sin: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        """x (P, H, D) to the same shape and dtype; float32 in between."""
        parts = x.reshape(*x.shape[:2], self.cos.shape[2], -1).astype(mx.float32)
        first, second = mx.split(parts, 2, axis=-1)
        rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        return mx.concatenate(rotated, axis=-1).reshape(x.shape).astype(x.dtype)


def patch_rope(angles: np.ndarray) -> PatchRope:
    """The rope of angles (P, parts, D / parts / 2)."""
    whole = mx.array(np.asarray(angles, np.float32))[:, None]
    return PatchRope(mx.cos(whole), mx.sin(whole))


def frequencies(theta: float, dims: int) -> np.ndarray:
    """(dims / 2,) radians per place. `dims` numbers of each head rotate."""
    return theta ** -(np.arange(0, dims, 2) / dims)


def rows_and_columns(grid: tuple[int, int, int]) -> np.ndarray:
    """(P, 2) the row and the column of each patch, row by row, of one frame after the other."""
    frames, rows, columns = grid
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
    return np.tile(places.reshape(-1, 2), (frames, 1))


def resampled(table: mx.array, down: np.ndarray, across: np.ndarray) -> mx.array:
    """A table of places (side, side, hidden) for another grid: (rows, columns, hidden) float32.

    Args:
        down: (rows, side) share of each place in each row.
        across: (columns, side) the same of columns.
    """
    side, _, hidden = table.shape
    by_row = mx.array(down) @ table.astype(mx.float32).reshape(side, -1)
    return mx.array(across) @ by_row.reshape(len(down), side, hidden)


def nearness(at: np.ndarray, places: int) -> np.ndarray:
    """(points, places) float32 weights of the two places beside each point, by distance."""
    return (1 - np.abs(at[:, None] - np.arange(places, dtype=np.float32))).clip(min=0)


def is_fused(dim: int) -> bool:
    """Whether MLX's attention of heads of `dim` numbers keeps no scores."""
    return mx.metal.is_available() and dim in FUSED_DIMS


def full_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of all patches to all.

    Args:
        queries: (H, P, D).
        keys, values: (Hkv, P, D), where Hkv divides H.

    Returns:
        (H, P, D).
    """
    heads, count, dim = queries.shape
    wide = next((one for one in sorted(FUSED_DIMS) if one >= dim), 0)
    if is_fused(wide) or heads * count * count <= MAX_SCORES:
        parts = [part[None] for part in (queries, keys, values)]
        if is_fused(wide) and wide > dim:  # zeros behind a head change no score
            parts = [mx.pad(part, [*[(0, 0)] * 3, (0, wide - dim)]) for part in parts]
        return mx.fast.scaled_dot_product_attention(*parts, scale=scale)[0, ..., :dim]
    block, shared = max(MAX_SCORES // count, 1), heads // keys.shape[0]
    attended: list[mx.array] = []
    for head in range(heads):
        seen = keys[None, head // shared, None], values[None, head // shared, None]
        for start in range(0, count, block):
            block_queries = queries[None, head, None, start : start + block]
            if attended:  # scores of one block at a time
                block_queries = mx.depends(block_queries, attended[-1])
            attended.append(mx.fast.scaled_dot_product_attention(block_queries, *seen, scale=scale))
    return mx.concatenate(attended, axis=2).reshape(heads, count, dim)


class Sight(Protocol):
    """Which patches of a tile see each other."""

    def seen(self, count: int) -> int:
        """How many of `count` patches one of them sees, at most."""
        ...

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Attention of queries (H, P, D) to keys and values (Hkv, P, D): (H, P, D)."""
        ...


class AllSee:
    """All patches of a tile see all."""

    def seen(self, count: int) -> int:
        return count

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        return full_attention(queries, keys, values, scale)


ALL_SEE = AllSee()
Pieces = Generator[mx.array, None, mx.array]
"""Yields what is to be evaluated before it goes on; returns the whole."""


class PatchAttention:
    """Attention of all patches of a tile to all.

    Args:
        qkv_proj: to H + 2 * Hkv heads of D numbers.
        heads: H and Hkv.
        norms: over each head of queries, keys and values; None: there is none.
    """

    __slots__ = ("heads", "norms", "o_proj", "qkv_proj", "scale")

    def __init__(
        self,
        qkv_proj: Projection,
        o_proj: Projection,
        *,
        heads: tuple[int, int],
        scale: float,
        norms: Sequence[Norm | None] = (None, None, None),
    ) -> None:
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.heads = heads
        self.scale = scale
        self.norms = tuple(norms)

    def run(self, x: mx.array, rope: PatchRope | None, sight: Sight) -> Pieces:
        """x (P, hidden) -> (P, hidden), some heads at a time."""
        (heads, kv_heads), count = self.heads, x.shape[0]
        made = self.qkv_proj(x).reshape(x.shape[0], heads + 2 * kv_heads, -1)
        parts = mx.split(made, [heads, heads + kv_heads], axis=1)
        queries, keys, values = (
            part if norm is None else norm(part)
            for part, norm in zip(parts, self.norms, strict=True)
        )
        if rope is not None:
            queries, keys = rope(queries), rope(keys)
        queries, keys, values = (part.swapaxes(0, 1) for part in (queries, keys, values))
        shared, pairs = heads // kv_heads, count * sight.seen(count)
        per_product = max(MAX_PRODUCTS // (2 * pairs * shared * queries.shape[-1]), 1)  # KV heads
        attended: list[mx.array] = []
        for start in range(0, kv_heads, per_product):
            if attended:
                yield attended[-1]
            rows = slice(start, start + per_product)
            group = queries[start * shared : (start + per_product) * shared]
            attended.append(sight.attend(group, keys[rows], values[rows], self.scale))
        joined = attended[0] if len(attended) == 1 else mx.concatenate(attended)
        return self.o_proj(joined.swapaxes(0, 1).flatten(1))


class PatchBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); outputs may have norms too.

    Args:
        before: norms before each of them.
        after: norms over the output of each, before it is added; None: there is none.
    """

    __slots__ = ("after", "attention", "before", "mlp")

    def __init__(
        self,
        attention: PatchAttention,
        mlp: FeedForward,
        *,
        before: Sequence[Norm],
        after: Sequence[Norm | None] = (None, None),
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.before = tuple(before)
        self.after = tuple(after)

    def run(self, x: mx.array, rope: PatchRope | None, sight: Sight = ALL_SEE) -> Pieces:
        """x (P, hidden) -> (P, hidden), in pieces that take a fraction of a second each."""
        attended = yield from self.attention.run(self.before[0](x), rope, sight)
        x = _added(x, attended, self.after[0])
        parts: list[mx.array] = []
        for start in range(0, x.shape[0], MAX_ROWS):
            if parts:
                yield parts[-1]
            rows = x[start : start + MAX_ROWS]
            parts.append(_added(rows, self.mlp(self.before[1](rows)), self.after[1]))
        x = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        yield x
        return x


def _added(x: mx.array, y: mx.array, norm: Norm | None) -> mx.array:
    return x + (y if norm is None else norm(y))


class Embed(Protocol):
    """Patches of a tile -> what the first block reads (P, hidden), and how heads rotate."""

    def __call__(self, patches: mx.array, tile: Tile) -> tuple[mx.array, PatchRope | None]:
        """Patches (P, row) float32."""
        ...


class Project(Protocol):
    """From the last block's output (P, hidden) to features in the text model's width."""

    def __call__(self, x: mx.array, tile: Tile) -> Features: ...


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a tower's blocks.

    Attributes:
        hidden, inner: of a patch's state, and in a feed-forward block.
        activation: name of the function in feed-forward blocks.
    """

    hidden: int
    inner: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    eps: float

    @classmethod
    def of(cls, fields: Fields, defaults: Mapping[str, Any]) -> "TowerSizes":
        """Read `vision_config`, with the defaults that its model type has."""
        read = Fields({**defaults, **fields.present}, fields.where)
        hidden = read.integer("hidden_size", high=2**16)
        heads = read.integer("num_attention_heads", high=2**12)
        kv_heads = read.integer("num_key_value_heads", high=2**12, default=heads)
        head_dim = read.integer("head_dim", high=2**12, default=hidden // heads)
        if heads % kv_heads or head_dim < 1:
            raise CheckpointError(
                f"{fields.where} has {heads} attention heads, {kv_heads} for K and V and a hidden "
                f"size of {hidden}; these do not fit together."
            )
        return cls(
            hidden=hidden,
            inner=read.integer("intermediate_size", high=2**20),
            depth=read.integer("num_hidden_layers", high=2**10),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            activation=read.text("hidden_activation", "hidden_act"),
            eps=read.number("rms_norm_eps", "layer_norm_eps", low=0.0, high=1.0),
        )


class Projected:
    """Features of patches, or of squares of patches side by side.

    Args:
        patches: what is computed of all patches (P, hidden), one after the other.
        side: patches of a square's side.
        squares: the same of all squares (P / side / side, side * side * hidden).
    """

    __slots__ = ("patches", "side", "squares")

    def __init__(
        self, patches: Sequence[Activation], side: int = 1, squares: Sequence[Activation] = ()
    ) -> None:
        self.patches = tuple(patches)
        self.side = side
        self.squares = tuple(squares)

    def __call__(self, x: mx.array, tile: Tile) -> Features:
        """(P, hidden) -> (P / side / side, text hidden)."""
        (_, rows, columns), side = tile.grid, self.side
        for compute in self.patches:
            x = compute(x)
        if side > 1:
            cells = x.reshape(rows // side, side, columns // side, side, -1).swapaxes(1, 2)
            x = cells.reshape(-1, side * side * x.shape[-1])
        for compute in self.squares:
            x = compute(x)
        return Features(x)


class PatchTower:
    """A tower: an embedding of patches, blocks, and a projection to the text model's width.

    Args:
        blocks: in their order; there may be none.
    """

    __slots__ = ("blocks", "embed", "project", "width")

    def __init__(
        self, embed: Embed, blocks: Sequence[PatchBlock], project: Project, *, width: int
    ) -> None:
        self.embed = embed
        self.blocks = list(blocks)
        self.project = project
        self.width = width

    def run(self, tile: Tile) -> Generator[mx.array, None, Features]:
        x, rope = self.embed(mx.array(tile.patches), tile)
        for block in self.blocks:
            x = yield from block.run(x, rope)
        return self.project(x, tile)

    def arrays(self) -> list[mx.array]:
        return list(arrays([self.embed, self.blocks, self.project]))


# -- building ---------------------------------------------------------------------------------


def vision_config(config: Fields) -> Fields:
    vision = config.fields("vision_config")
    if vision is None:
        raise CheckpointError(f"{config.where} has no vision_config, which this tower needs.")
    return vision


def text_width(config: Fields) -> int:
    return (config.fields("text_config") or config).integer("hidden_size", high=2**20)


def rope_theta(vision: Fields, default: float) -> float:
    stated = vision.fields("rope_parameters") or vision
    return stated.number("rope_theta", above=1.0, default=default)


def layer_norm(weights: Weights, path: str, dims: int, eps: float) -> LayerNorm:
    """The layer norm at `path`, with a bias."""
    weight = weights.take(f"{path}.weight", (dims,))
    return LayerNorm(weight, eps, weights.take(f"{path}.bias", (dims,)))


def rms_norm(weights: Weights, path: str, dims: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
    return RMSNorm(weights.take(f"{path}.weight", (dims,), offset=offset), eps)


def linear(weights: Weights, path: str, out_dims: int, in_dims: int) -> Projection:
    return weights.linear(path, out_dims, in_dims, bias=f"{path}.bias" in weights)


def patch_conv(weights: Weights, path: str, out_dims: int, inputs: Sequence[int]) -> Linear:
    """The convolution at `path` over patches that do not overlap, as a matrix.

    Its inputs are colours, perhaps frames, rows and columns. MLX checkpoints have colours last.
    """
    name, last = f"{path}.weight", (out_dims, *inputs[1:], inputs[0])
    if weights.has_shape(name, last):
        weight = mx.moveaxis(weights.take(name, last), -1, 1)
    else:
        weight = weights.take(name, (out_dims, *inputs))
    has_bias = f"{path}.bias" in weights
    bias = weights.take(f"{path}.bias", (out_dims,)) if has_bias else None
    return Linear(mx.contiguous(weight.flatten(1)), bias)


def attention(
    weights: Weights, path: str, sizes: TowerSizes, *, output: str = "o_proj"
) -> PatchAttention:
    """The attention at `path`, with biases if the checkpoint has some."""
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    qkv = weights.fused(
        [f"{path}.{name}_proj" for name in "qkv"],
        [heads * dim, kv_heads * dim, kv_heads * dim],
        sizes.hidden,
        bias=f"{path}.q_proj.bias" in weights,
    )
    output_proj = linear(weights, f"{path}.{output}", sizes.hidden, heads * dim)
    return PatchAttention(qkv, output_proj, heads=(heads, kv_heads), scale=dim**-0.5)


def gated_mlp(weights: Weights, path: str, sizes: TowerSizes) -> MLP:
    """down(act(gate(x)) * up(x))."""
    gate_up = weights.fused(
        [f"{path}.gate_proj", f"{path}.up_proj"], [sizes.inner, sizes.inner], sizes.hidden
    )
    down = linear(weights, f"{path}.down_proj", sizes.hidden, sizes.inner)
    return MLP(gate_up, down, gated(sizes.activation, weights.dtype))


def plain_mlp(
    weights: Weights, paths: Sequence[str], dims: tuple[int, int, int], activation: str
) -> MLP:
    """The second matrix of act(first(x)); `dims`: of what goes in, between them, and out."""
    before, inner, behind = dims
    up = linear(weights, paths[0], inner, before)
    down = linear(weights, paths[1], behind, inner)
    return MLP(up, down, plain(activation))
