"""Token ids to vectors and back to logits, dense or quantised. Knows no vocabulary."""

from typing import Protocol

import mlx.core as mx

from .linear import TILE, Linear, Projection, TiledLinear, tiled
from .quantized import QuantizedLinear


class Embedding(Protocol):
    """A table of one row per token."""

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        ...

    def as_linear(self) -> Projection:
        """The output projection of a model that shares the table with its input."""
        ...


def dense_embedding(weight: mx.array, *, shared: bool) -> Embedding:
    """A dense table (vocab_size, hidden_size); `shared`: it is the output projection, too."""
    tiles = tiled(weight) if shared else None
    return DenseEmbedding(weight) if tiles is None else TiledEmbedding(tiles)


class DenseEmbedding:
    """A dense table, row by row."""

    __slots__ = ("weight",)

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight  # (vocab_size, hidden_size)

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        return self.weight[ids]

    def as_linear(self) -> Linear:
        """The same numbers, seen as a matrix."""
        return Linear(self.weight)


class TiledEmbedding:
    """A dense table in the layout that its use as output projection wants."""

    __slots__ = ("tiles",)

    def __init__(self, tiles: mx.array) -> None:
        self.tiles = tiles  # (vocab_size / TILE, hidden_size, TILE)

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        return self.tiles[ids // TILE, :, ids % TILE]

    def as_linear(self) -> TiledLinear:
        """The same numbers, seen as a matrix."""
        return TiledLinear(self.tiles)


class QuantizedEmbedding:
    """A quantised table; the rows asked for are dequantised."""

    __slots__ = ("dtype", "table")

    def __init__(self, table: QuantizedLinear, dtype: mx.Dtype) -> None:
        self.table = table
        self.dtype = dtype

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        table = self.table
        rows = mx.dequantize(
            table.weight[ids],
            table.scales[ids],
            None if table.biases is None else table.biases[ids],
            table.group_size,
            table.bits,
            table.mode,
        )
        return rows.astype(self.dtype)

    def as_linear(self) -> QuantizedLinear:
        """The same numbers, seen as a matrix."""
        return self.table
