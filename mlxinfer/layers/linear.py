"""Projections and token tables, with dense or quantised weights."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import mlx.core as mx


class Projection(Protocol):
    """x (T, in_dims) -> (T, out_dims)."""

    __slots__ = ()

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """The product, plus the bias if there is one, plus `residual` (T, out_dims) if it is given.

        It is one operation if the format has one.
        """

    def some_outputs(self, outputs: slice) -> "Projection | None":
        """Some of the outputs, over the same memory; None: they are computed all at once."""
        return None


class Linear(Projection):
    """A dense matrix, kept as the transposed view that the product needs."""

    __slots__ = ("bias", "transposed")

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        self.transposed = weight.T  # (in_dims, out_dims)
        self.bias = bias  # (out_dims,)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual, which takes part in the product."""
        if residual is not None:
            y = mx.addmm(residual, x, self.transposed)
            return y if self.bias is None else y + self.bias
        if self.bias is None:
            return x @ self.transposed
        return mx.addmm(self.bias, x, self.transposed)

    def some_outputs(self, outputs: slice) -> "Linear":
        weight, bias = self.transposed.T[outputs], self.bias
        return Linear(weight, None if bias is None else bias[outputs])


@dataclass(slots=True, eq=False)
class QuantizedMatrix:
    """A matrix, or a stack of matrices, in one of MLX's quantised formats."""

    weight: mx.array  # (..., out_dims, in_dims * bits / 32) uint32
    scales: mx.array  # (..., out_dims, in_dims / group_size)
    biases: mx.array | None  # as scales; affine only
    bias: mx.array | None = None  # (..., out_dims)
    _: KW_ONLY
    group_size: int
    bits: int
    mode: str


class QuantizedLinear(QuantizedMatrix, Projection):
    """A quantised matrix; the product dequantises as it goes."""

    __slots__ = ()

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        form = (self.group_size, self.bits, self.mode)
        y = mx.quantized_matmul(x, self.weight, self.scales, self.biases, True, *form)
        if self.bias is not None:
            y = y + self.bias
        return y if residual is None else residual + y

    def some_outputs(self, outputs: slice) -> "QuantizedLinear":
        return QuantizedLinear(
            self.weight[outputs],
            self.scales[outputs],
            None if self.biases is None else self.biases[outputs],
            None if self.bias is None else self.bias[outputs],
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


class Rotation:
    """A change of basis: signs, then an orthonormal Hadamard matrix over each block of numbers.

    It is computed in float32, whatever the dtype of x.

    Args:
        signs: (dims,) float32, 1 or -1.
        block: numbers that are mixed with each other, a power of two that divides dims.
    """

    __slots__ = ("block", "scale", "signs")

    def __init__(self, signs: mx.array, block: int) -> None:
        self.signs = signs
        self.block = block
        self.scale = block**-0.5

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims) in the rotated basis."""
        return self._mixed(x.astype(mx.float32) * self.signs).astype(x.dtype)

    def back(self, x: mx.array) -> mx.array:
        """x (..., dims) from the rotated basis."""
        return (self._mixed(x.astype(mx.float32)) * self.signs).astype(x.dtype)

    def equals(self, other: "Rotation") -> bool:
        return self.block == other.block and bool(mx.array_equal(self.signs, other.signs))

    def _mixed(self, x: mx.array) -> mx.array:
        blocks = mx.unflatten(x, -1, (-1, self.block))
        return mx.hadamard_transform(blocks, scale=self.scale).flatten(-2)


@dataclass(slots=True, eq=False)
class RotatedLinear(Projection):
    """A projection whose matrix is rotated along its inputs, as they are before the product."""

    projection: Projection
    rotation: Rotation

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        return self.projection(self.rotation(x), residual)


def matrix_of(projection: Projection) -> tuple[mx.array, ...] | None:
    """The matrix of a projection, if the projection is one plain matrix without a bias.

    Returns:
        Affine codes, scales and biases, as in `QuantizedLinear`; numbers (out_dims, in_dims) alone;
        or None: it is something else.
    """
    if isinstance(projection, QuantizedLinear):
        if projection.mode != "affine" or projection.biases is None or projection.bias is not None:
            return None
        return projection.weight, projection.scales, projection.biases
    if isinstance(projection, Linear) and projection.bias is None:
        return (projection.transposed.T,)
    return None


class Joined(Projection):
    """Several projections of the same input, side by side: for formats that cannot be fused."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Projection]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, sum of out_dims), plus the residual."""
        y = mx.concatenate([part(x) for part in self.parts], axis=-1)
        return y if residual is None else residual + y


class Embedding(Protocol):
    """A table of one row per token."""

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""

    def as_linear(self) -> Projection:
        """The output projection of a model that shares the table with its input."""


@dataclass(slots=True, eq=False)
class DenseEmbedding:
    """A dense table, row by row."""

    weight: mx.array  # (vocab_size, hidden_size)

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        return self.weight[ids]

    def as_linear(self) -> Linear:
        return Linear(self.weight)


@dataclass(slots=True, eq=False)
class QuantizedEmbedding:
    """A quantised table; only the rows of the step's tokens are dequantised."""

    table: QuantizedLinear
    dtype: mx.Dtype

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
        return self.table


@dataclass(slots=True, eq=False)
class RotatedEmbedding:
    """A table with rotated rows."""

    table: Embedding
    rotation: Rotation

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        return self.rotation.back(self.table(ids))

    def as_linear(self) -> RotatedLinear:
        return RotatedLinear(self.table.as_linear(), self.rotation)


class HeadLinear(Protocol):
    """One matrix (out_dims, in_dims) for each of H heads, used in both directions."""

    def __call__(self, x: mx.array, *, transposed: bool) -> mx.array:
        """x (H or 1, N, in_dims) -> (H, N, out_dims), or the other way round.

        Args:
            transposed: the product with each transposed matrix, as a projection computes it; else
                with the matrix as it is, out_dims to in_dims.
        """


class DenseHeadLinear:
    """Dense matrices, stacked."""

    __slots__ = ("transposed", "weight")

    def __init__(self, weight: mx.array) -> None:
        self.weight = weight  # (H, out_dims, in_dims)
        self.transposed = weight.swapaxes(-1, -2)

    def __call__(self, x: mx.array, *, transposed: bool) -> mx.array:
        return x @ (self.transposed if transposed else self.weight)


class QuantizedHeadLinear(QuantizedMatrix):
    """Quantised matrices, stacked."""

    __slots__ = ()

    def __call__(self, x: mx.array, *, transposed: bool) -> mx.array:
        if x.shape[0] == 1:
            x = mx.broadcast_to(x, (self.weight.shape[0], *x.shape[1:]))
        form = (self.group_size, self.bits, self.mode)
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, transposed, *form)
