"""Matrix products with dense weights, and what a projection is. Knows no checkpoint names."""

import sys
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

TILE = 32  # outputs a tile
UNPACKED = 1_000_000  # multiplications of a product that OpenBLAS does without packing it first


class Projection(Protocol):
    """x (T, in_dims) -> (T, out_dims)."""

    def __call__(self, x: mx.array) -> mx.array:
        """The product, and the bias where there is one."""
        ...

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual (T, out_dims) + self(x), in one operation where the format has one."""
        ...


def dense(weight: mx.array, bias: mx.array | None = None) -> Projection:
    """A dense matrix (out_dims, in_dims), stored as is quickest to read on this machine."""
    tiles = tiled(weight)
    return Linear(weight, bias) if tiles is None else TiledLinear(tiles, bias)


def tiled(weight: mx.array) -> mx.array | None:
    """(..., out_dims, in_dims) as (..., out_dims / TILE, in_dims, TILE); None where it is no gain.

    For float32 on the CPU. A BLAS treats the product of a few rows with a large transposed matrix
    as a large product: it packs the matrix first, at a quarter of the memory's speed, or walks down
    its columns. Small contiguous tiles are read once and in order (measured: three to six times
    faster with OpenBLAS for 1 to 8 rows, and more than twice with MLX's own for any number).
    """
    *stack, out_dims, in_dims = weight.shape
    if mx.metal.is_available() or weight.dtype != mx.float32 or out_dims % TILE:
        return None
    parts = weight.reshape(*stack, out_dims // TILE, TILE, in_dims)
    return mx.contiguous(parts.swapaxes(-1, -2))


class Linear:
    """A dense matrix, kept as the transposed view that the product wants."""

    __slots__ = ("bias", "transposed")

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        self.transposed = weight.T  # (in_dims, out_dims)
        self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, in_dims) -> (T, out_dims)."""
        if self.bias is None:
            return x @ self.transposed
        return mx.addmm(self.bias, x, self.transposed)

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual + self(x); the residual takes part in the product."""
        y = mx.addmm(residual, x, self.transposed)
        return y if self.bias is None else y + self.bias


class TiledLinear:
    """A dense matrix in tiles of outputs, each a small product of its own.

    Many rows are multiplied in blocks, small enough to be quick (measured: 20 to 35 % faster from
    64 rows on); where a tile is too large for that, all at once.
    """

    __slots__ = ("bias", "block_rows", "shape", "tiles")

    def __init__(self, tiles: mx.array, bias: mx.array | None = None) -> None:
        self.tiles = tiles  # (out_dims / TILE, in_dims, TILE)
        self.bias = bias
        self.shape = (-1, tiles.shape[0] * TILE)
        self.block_rows = min(32, UNPACKED // (TILE * tiles.shape[1]) // 16 * 16) or sys.maxsize

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, in_dims) -> (T, out_dims)."""
        rows = x.shape[0]
        missing = -rows % self.block_rows  # from the last block
        if rows >= 2 * self.block_rows and 8 * missing <= rows:
            y = self._in_blocks(x, missing)
        else:
            y = x @ self.tiles  # (out_dims / TILE, T, TILE)
            y = (y if rows == 1 else y.swapaxes(0, 1)).reshape(self.shape)
        return y if self.bias is None else y + self.bias

    def _in_blocks(self, x: mx.array, missing: int) -> mx.array:
        padded = mx.pad(x, [(0, missing), (0, 0)]) if missing else x
        blocks = padded.reshape(-1, 1, self.block_rows, x.shape[1])
        return (blocks @ self.tiles).swapaxes(1, 2).reshape(self.shape)[: len(x)]

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual + self(x)."""
        return residual + self(x)


class Joined:
    """Several projections of the same input, side by side: for formats that cannot be fused."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Projection]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, in_dims) -> (T, sum of out_dims)."""
        return mx.concatenate([part(x) for part in self.parts], axis=-1)

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual + self(x)."""
        return residual + self(x)
