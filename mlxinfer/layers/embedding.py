"""Token ids to vectors and back to logits, dense or quantised. Knows no vocabulary."""

import mlx.core as mx

from .linear import Linear, QuantizedLinear


class Embedding:
    """A dense table of one row per token."""

    __slots__ = ("weight",)

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight  # (vocab_size, hidden_size)

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        return self.weight[ids]

    def as_linear(self) -> Linear:
        """The output projection of a model that shares it with the input."""
        return Linear(self.weight)


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
        """The output projection of a model that shares it with the input."""
        return self.table
