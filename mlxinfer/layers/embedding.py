"""The token table, dense or quantised: ids to vectors, and its use as output projection."""

from typing import Protocol

import mlx.core as mx

from .linear import Linear, Projection, QuantizedLinear


class Embedding(Protocol):
    """A table of one row per token."""

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        ...

    def as_linear(self) -> Projection:
        """The output projection of a model that shares the table with its input."""
        ...


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


class QuantizedEmbedding:
    """A quantised table; only the rows of the step's tokens are dequantised."""

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
