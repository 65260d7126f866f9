"""Parts that Qwen's towers share: cells of patches, frames and windows, and one feature a cell.

P = patches of a tile. A cell is a square of `side` patches; the patches of a cell lie together, in
the order in which a processor gives them. The cells of a frame lie row by row, and frames after
each other. Patches see those of their own frame, or of their own window in it.
Source: transformers 5.24, models/qwen2_vl, models/qwen2_5_vl and models/qwen3_vl.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...images import Tile
from ...layers.linear import Projection
from ...layers.mlp import gelu_of
from ...layers.norm import Norm
from ..jsonfields import Fields
from ..language import arrays
from ..weights.weights import Weights
from . import Features
from .parts import (
    MAX_SCORES,
    PatchAttention,
    PatchBlock,
    TowerSizes,
    frequencies,
    full_attention,
    is_fused,
    nearness,
    patch_rope,
    resampled,
)

THETA = 10_000.0  # of rows and columns
EPS = 1e-6  # of all norms
Numbers = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class CellMerger:
    """Patches of a cell side by side -> one feature: two matrices, exact GELU between them."""

    norm: Norm  # over a patch, or over all of a cell
    up: Projection
    down: Projection
    cell: int  # patches of a cell
    of_cells: bool = False  # the norm is over all of a cell

    def __call__(self, x: mx.array) -> mx.array:
        """x (P, hidden) -> (P / cell, text hidden)."""
        shape = -1, self.cell * x.shape[-1]
        x = self.norm(x.reshape(shape)) if self.of_cells else self.norm(x).reshape(shape)
        return self.down(gelu_of(mx.erf)(self.up(x)))


@dataclass(slots=True, eq=False)
class PlaceTable:
    """Learned vectors of a square of places, stretched over the patches of a frame."""

    table: mx.array  # (places, places, hidden)

    def __call__(self, rows: int, columns: int) -> mx.array:
        """(rows, columns, hidden) float32; corners of the square lie on corners of the frame."""
        places = len(self.table)
        return resampled(self.table, _stretched(places, rows), _stretched(places, columns))


def _stretched(places: int, count: int) -> np.ndarray:
    """(count, places) weights of places for points from the first to the last, both included."""
    at = np.arange(count, dtype=np.float32) * np.float32(places - 1) / np.float32(max(count - 1, 1))
    return nearness(at, places)


@dataclass(frozen=True, slots=True)
class Windows:
    """Which patches of a frame see each other."""

    order: Numbers  # (cells,) cells of a frame in the order in which the tower has them
    # windows of equal size lie together: how many, and patches of each
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, rows: int, columns: int, side: int, cell: int) -> "Windows":
        """Windows of `side` x `side` cells, smaller at the end of rows and of columns.

        Args:
            cell: patches of a cell.
        """
        numbers = np.arange(rows * columns).reshape(rows, columns)
        edges = [[*range(0, count, side), count] for count in (rows, columns)]
        parts = [
            numbers[top:bottom, left:right].flatten()
            for (top, bottom), (left, right) in product(*map(pairwise, edges))
        ]
        parts.sort(key=len)
        sizes = [len(part) for part in parts]
        runs = tuple((sizes.count(size), size * cell) for size in dict.fromkeys(sizes))
        return cls(np.concatenate(parts), runs)

    def seen(self, count: int) -> int:
        return max(length for _, length in self.runs)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """P is a multiple of a frame's patches."""
        size = sum(count * length for count, length in self.runs)
        heads, whole, dim = queries.shape
        frames = [x.reshape(heads, -1, size, dim) for x in (queries, keys, values)]
        attended, start = [], 0
        for count, length in self.runs:
            stop = start + count * length
            q, k, v = (x[:, :, start:stop].reshape(heads, -1, length, dim) for x in frames)
            seen = _by_window(q, k, v, scale)
            attended.append(seen.reshape(heads, whole // size, stop - start, dim))
            start = stop
        return mx.concatenate(attended, axis=2).reshape(heads, whole, dim)


def _by_window(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention (H, windows, L, D) within each window."""
    heads, count, length, dim = queries.shape
    if count == 1:
        return full_attention(queries[:, 0], keys[:, 0], values[:, 0], scale)[:, None]
    if not is_fused(dim) and heads * length * length > MAX_SCORES:
        parts = zip(*(mx.split(x, count, axis=1) for x in (queries, keys, values)), strict=True)
        return mx.concatenate([_by_window(q, k, v, scale) for q, k, v in parts], axis=1)
    per_product = count if is_fused(dim) else MAX_SCORES // (heads * length * length)
    attended: list[mx.array] = []
    for start in range(0, count, per_product):
        block = [x[:, start : start + per_product].swapaxes(0, 1) for x in (queries, keys, values)]
        if attended:  # scores of a few windows at a time
            block[0] = mx.depends(block[0], attended[-1])
        seen = mx.fast.scaled_dot_product_attention(*block, scale=scale)
        attended.append(seen.swapaxes(0, 1))
    return mx.concatenate(attended, axis=1)


@dataclass(frozen=True, slots=True)
class MergedSizes:
    """Sizes of a tower with cells.

    Attributes:
        blocks: of attention and feed-forward.
        row: numbers of a patch: its pixels in all colours, of `frames` frames.
        side: patches of a cell's side.
        out: hidden size of the text model.
        window: cells of a window's side; 0: there are no windows.
        full: blocks in which patches see all of their frame; with windows alone it counts.
    """

    blocks: TowerSizes
    row: tuple[int, int, int, int]  # colours, frames, rows and columns
    side: int
    out: int
    window: int = 0
    full: tuple[int, ...] = ()

    @property
    def cell(self) -> int:
        return self.side * self.side

    def sees_all(self, block: int) -> bool:
        """Whether patches see all of their frame in a block."""
        return not self.window or block in self.full


class MergedTower:
    """A tower whose features are cells of patches.

    Args:
        embed: (P, row) -> (P, hidden).
        places: vectors that are added by a patch's place; None: there are none.
        deep: by the block behind which more features are taken (DeepStack), their mergers.
    """

    __slots__ = ("blocks", "deep", "dtype", "embed", "merger", "places", "sizes")

    def __init__(
        self,
        embed: Projection,
        blocks: Sequence[PatchBlock],
        merger: CellMerger,
        *,
        sizes: MergedSizes,
        dtype: mx.Dtype,
        places: PlaceTable | None = None,
        deep: Mapping[int, CellMerger] | None = None,
    ) -> None:
        self.embed = embed
        self.places = places
        self.blocks = list(blocks)
        self.merger = merger
        self.deep = dict(deep or {})
        self.sizes = sizes
        self.dtype = dtype

    @property
    def width(self) -> int:
        return (1 + len(self.deep)) * self.sizes.out

    def run(self, tile: Tile) -> Generator[mx.array, None, Features]:
        sizes, (frames, rows, columns) = self.sizes, self._checked(tile)
        of_frame = Windows(np.arange(rows * columns // sizes.cell), ((1, rows * columns),))
        windows = of_frame
        if sizes.window:
            across = columns // sizes.side
            windows = Windows.of(rows // sizes.side, across, sizes.window, sizes.cell)
        order = in_cells(np.arange(rows * columns).reshape(rows, columns), sizes.side)
        order = order.reshape(-1, sizes.cell)[windows.order].flatten()  # (patches of a frame,)
        x = self._embedded(tile, windows.order)
        if self.places is not None:
            added = self.places(rows, columns).flatten(0, 1)[mx.array(order)].astype(x.dtype)
            x = (x.reshape(frames, rows * columns, -1) + added).flatten(0, 1)
        places = np.tile(np.stack(np.divmod(order, columns), -1), (frames, 1))  # (P, 2)
        speeds = frequencies(THETA, sizes.blocks.head_dim // 2)
        rope = patch_rope((places[:, :, None] * speeds).reshape(len(places), 1, -1))
        yield x
        deep = []
        for index, block in enumerate(self.blocks):
            seen = of_frame if sizes.sees_all(index) else windows
            x = yield from block.run(x, rope, seen)
            if index in self.deep:
                deep.append(self._in_order(self.deep[index](x), windows.order))
                yield deep[-1]
        return Features(self._in_order(self.merger(x), windows.order), tuple(deep))

    def _embedded(self, tile: Tile, order: Numbers) -> mx.array:
        """(P, hidden) of the patches, cells of each frame in an order."""
        patches = tile.patches.reshape(tile.grid[0], -1, self.sizes.cell, tile.patches.shape[-1])
        ordered = patches if (np.diff(order) == 1).all() else patches[:, order]
        flat = mx.array(ordered.reshape(tile.patches.shape))
        return self.embed(flat.astype(self.dtype))

    @staticmethod
    def _in_order(features: mx.array, order: Numbers) -> mx.array:
        """Features of cells (N, hidden) in an order -> row by row."""
        if (np.diff(order) == 1).all():
            return features
        frames = features.reshape(-1, len(order), features.shape[-1])
        return frames[:, mx.array(np.argsort(order))].flatten(0, 1)

    def _checked(self, tile: Tile) -> tuple[int, int, int]:
        frames, rows, columns = tile.grid
        side, row = self.sizes.side, prod(self.sizes.row)
        shape = frames * rows * columns, row
        assert tile.patches.shape == shape, f"patches {tile.patches.shape}, expected {shape}"
        assert not rows % side, f"{rows} rows in cells of {side}"
        assert not columns % side, f"{columns} columns in cells of {side}"
        return tile.grid

    def arrays(self) -> list[mx.array]:
        deep = list(self.deep.values())
        return list(arrays([self.embed, self.places, self.blocks, self.merger, deep]))


def in_cells(grid: Numbers, side: int) -> Numbers:
    """A grid (rows, columns) -> (P,), cells of `side` x `side` one after the other."""
    rows, columns = grid.shape
    return grid.reshape(rows // side, side, columns // side, side).transpose(0, 2, 1, 3).flatten()


# -- building ---------------------------------------------------------------------------------


def seeing_config(config: Fields, defaults: Mapping[str, Any]) -> Fields:
    """The `vision_config` of config.json, with the defaults of its model type."""
    vision, text = config.fields("vision_config"), config.fields("text_config") or config
    assert vision is not None
    rope = text.fields("rope_parameters", "rope_scaling")
    if rope is None or rope.items("mrope_section") is None:
        raise CheckpointError(
            f"{text.where} has no mrope_section in its rope_parameters or rope_scaling, without "
            "which pictures have no rows and columns."
        )
    stated = vision.values
    if "in_chans" in stated:  # as published configs of Qwen2-VL and Qwen2.5-VL call it
        stated = {"in_channels": stated["in_chans"], **stated}
    return Fields({**defaults, **stated}, vision.where)


def merged_sizes(
    vision: Fields,
    *,
    hidden: str,
    out: str,
    inner: int | None = None,
    window: int = 0,
    full: Sequence[int] = (),
) -> MergedSizes:
    """Sizes that `vision_config` states.

    Args:
        vision: it, with the defaults of its model type.
        hidden, out: keys of the tower's and of the text model's hidden size.
        inner: of feed-forward blocks; None: as stated.
        window, full: see `MergedSizes`.
    """
    patch = vision.integer("patch_size", high=256)
    return MergedSizes(
        _tower_sizes(vision, vision.integer(hidden, high=2**16), inner),
        row=(
            vision.integer("in_channels", "in_chans", high=64),
            vision.integer("temporal_patch_size", high=64),
            patch,
            patch,
        ),
        side=vision.integer("spatial_merge_size", high=64),
        out=vision.integer(out, high=2**20),
        window=window,
        full=tuple(full),
    )


def _tower_sizes(vision: Fields, width: int, inner: int | None) -> TowerSizes:
    stated = {
        **vision.stated({"num_heads": "num_attention_heads", "depth": "num_hidden_layers"}),
        **vision.stated({"hidden_act": "hidden_act", "intermediate_size": "intermediate_size"}),
        "hidden_size": width,
        "rms_norm_eps": EPS,
    }
    if inner is not None:
        stated["intermediate_size"] = inner
    sizes = TowerSizes.of(Fields(stated, vision.where), {})
    if width % sizes.heads or sizes.head_dim % 4:
        raise CheckpointError(
            f"{vision.where} has {sizes.heads} heads of a hidden size of {width}; expected heads "
            "of 4, 8, 12 and so on numbers."
        )
    return sizes


def merged_attention(weights: Weights, path: str, sizes: TowerSizes) -> PatchAttention:
    """The attention at `path`, its Q, K and V in one matrix."""
    hidden, heads = sizes.hidden, sizes.heads
    return PatchAttention(
        weights.linear(f"{path}.qkv", 3 * hidden, hidden, bias=True),
        weights.linear(f"{path}.proj", hidden, hidden, bias=True),
        heads=(heads, heads),
        scale=sizes.head_dim**-0.5,
    )


def cell_merger(
    weights: Weights,
    names: tuple[str, str],
    norm: Norm,
    sizes: MergedSizes,
    *,
    of_cells: bool = False,
) -> CellMerger:
    joined = sizes.cell * sizes.blocks.hidden
    return CellMerger(
        norm,
        weights.linear(names[0], joined, joined, bias=True),
        weights.linear(names[1], sizes.out, joined, bias=True),
        cell=sizes.cell,
        of_cells=of_cells,
    )
