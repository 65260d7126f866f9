"""Quantises a block of rows into codes, scales and biases of an MLX format, and sums the errors.

`quantise` is numpy only, so that several threads can work at once; rows are processed in tiles that
stay in a processor's cache. `round_trip` gives the values that come back, without any file.

Numbers are rounded to the nearest code, or in the order of the inputs with error feedback
(feedback.py): then each group's scale is chosen for what the errors before it have made of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from . import affine, floats
from .arrays import Floats, Words, as_numpy, narrow, pack, widen
from .feedback import ErrorFeedback
from .read import MLXFormat

TILE = 1 << 17  # numbers
SAMPLED = 8


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Some rows of a matrix as MLX packs them, bytes as they lie on disk."""

    weight: Words  # (R, in * bits / 32)
    scales: NDArray[np.generic]  # (R, in / group_size): uint8, or as numbers.RAW has its dtype
    biases: NDArray[np.generic] | None  # as scales; affine only


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """What rounding did to some numbers; errors of several parts add up."""

    squares: float = 0.0  # of the differences
    weighted: float = 0.0  # the same, each weighted with its channel's importance
    energy: float = 0.0  # squares of the numbers themselves
    largest: float = 0.0  # difference

    def __add__(self, other: "ErrorStats") -> "ErrorStats":
        return ErrorStats(
            self.squares + other.squares,
            self.weighted + other.weighted,
            self.energy + other.energy,
            max(self.largest, other.largest),
        )

    @property
    def relative(self) -> float:
        """Root mean square of the differences, as a share of that of the numbers."""
        return float(np.sqrt(self.squares / self.energy)) if self.energy else 0.0


@dataclass(frozen=True, slots=True)
class QuantisationMethod:
    """How scales are chosen."""

    form: MLXFormat
    dtype: str  # of affine scales and biases
    searched: bool = True  # False: as mx.quantize does
    importance: Floats | None = None  # (in_dims,), mean 1: weights of squared errors
    feedback: ErrorFeedback | None = None  # None: to the nearest code
    sampled: bool = False  # the error of one tile in SAMPLED stands for all


def quantise(values: Floats, method: QuantisationMethod) -> tuple[QuantisedRows, ErrorStats]:
    """values (R, in_dims), in_dims a multiple of the group size."""
    rows, in_dims = values.shape
    step = max(1, TILE // in_dims) if method.feedback is None else ErrorFeedback.ROWS
    importance = None
    if method.importance is not None:
        importance = method.importance.reshape(-1, method.form.group_size)
    tiles = []
    for number, start in enumerate(range(0, rows, step)):
        measured = not method.sampled or number % SAMPLED == 0
        tiles.append(_tile(values[start : start + step], method, importance, measured))
    return _joined([tile for tile, _ in tiles]), total(error for _, error in tiles)


def total(errors: Iterable[ErrorStats]) -> ErrorStats:
    """The sum."""
    return sum(errors, ErrorStats())


def compare(found: Floats, values: Floats, importance: Floats | None = None) -> ErrorStats:
    """found and values (R, in_dims), importance (in_dims,)."""
    difference = found - values
    squares = squares_of(difference)
    weighted = squares
    if importance is not None:
        weighted = float(
            np.einsum("rk,rk,k->r", difference, difference, importance).sum(dtype=float)
        )
    largest = float(np.abs(difference, out=difference).max(initial=0.0))
    return ErrorStats(squares, weighted, squares_of(values), largest)


def squares_of(values: Floats) -> float:
    """Sum over (R, in_dims); rows first, so that it does not depend on how many come at once."""
    return float(np.einsum("rk,rk->r", values, values).sum(dtype=np.float64))


class _Rounding(Protocol):
    """How groups (R, G, group_size) become codes; scales are of shape (R, G, 1)."""

    def scales(self, groups: Floats, importance: Floats | None) -> tuple[NDArray[Any], ...]:
        """The parameters of each group."""
        ...

    def codes(self, values: Floats, scales: tuple[NDArray[Any], ...]) -> NDArray[Any]:
        """The nearest code of each number."""
        ...

    def decode(self, codes: NDArray[Any], scales: tuple[NDArray[Any], ...]) -> Floats:
        """What codes stand for."""
        ...


@dataclass(frozen=True, slots=True)
class _Affine:
    """Scale and bias in a 16- or 32-bit dtype."""

    method: QuantisationMethod

    def scales(self, groups: Floats, importance: Floats | None) -> tuple[NDArray[Any], ...]:
        """Scale and bias."""
        bits, dtype = self.method.form.bits, self.method.dtype
        if self.method.searched:
            # error feedback takes so much longer that a better scale costs nothing beside it
            refinements = 0 if self.method.feedback is None else 1
            return affine.search(groups, bits, dtype, importance, refinements)
        return affine.by_extremes(groups, bits, dtype)

    def codes(self, values: Floats, scales: tuple[NDArray[Any], ...]) -> NDArray[Any]:
        """As float32."""
        scale, bias = scales
        return affine.encode(values, scale, bias, self.method.form.bits)

    def decode(self, codes: NDArray[Any], scales: tuple[NDArray[Any], ...]) -> Floats:
        """codes * scale + bias."""
        scale, bias = scales
        found: Floats = codes * scale
        found += bias
        return found


@dataclass(frozen=True, slots=True)
class _FloatingPoint:
    """One byte of scale."""

    method: QuantisationMethod

    def scales(self, groups: Floats, importance: Floats | None) -> tuple[NDArray[Any], ...]:
        """The byte."""
        usual_only = not self.method.searched
        return (floats.search(groups, self.method.form, importance, usual_only=usual_only),)

    def codes(self, values: Floats, scales: tuple[NDArray[Any], ...]) -> NDArray[Any]:
        """Bytes."""
        return floats.encode(values, scales[0], self.method.form)

    def decode(self, codes: NDArray[Any], scales: tuple[NDArray[Any], ...]) -> Floats:
        """Elements times scale."""
        return floats.decode(codes, scales[0], self.method.form)


def _tile(
    values: Floats, method: QuantisationMethod, importance: Floats | None, measured: bool
) -> tuple[QuantisedRows, ErrorStats]:
    form = method.form
    groups = np.ascontiguousarray(values).reshape(len(values), -1, form.group_size)
    rounding: _Rounding = _Affine(method) if form.mode == "affine" else _FloatingPoint(method)
    if method.feedback is None:
        scales = rounding.scales(groups, importance)
        codes = rounding.codes(groups, scales)
    else:
        codes, scales = _fed_back(groups, rounding, method.feedback, importance)
    packed = pack(affine.as_codes(codes).reshape(values.shape), form.bits)
    if form.mode == "affine":
        scale, bias = (narrow(part[..., 0], method.dtype) for part in scales)
        rows = QuantisedRows(packed, scale, bias)
    else:
        rows = QuantisedRows(packed, scales[0][..., 0], None)
    if not measured:
        return rows, ErrorStats()
    found = rounding.decode(codes, scales)
    return rows, compare(found.reshape(values.shape), values, method.importance)


def _fed_back(
    groups: Floats, rounding: _Rounding, feedback: ErrorFeedback, importance: Floats | None
) -> tuple[NDArray[Any], tuple[NDArray[Any], ...]]:
    """Codes (R, G, group_size) and scales (R, G, 1) each, group by group."""
    rows, count, size = groups.shape
    codes: list[NDArray[Any]] = []
    scales: list[tuple[NDArray[Any], ...]] = []
    left = feedback.begin(groups.reshape(rows, -1))
    for number in range(count):
        group = left.group(number * size, (number + 1) * size)
        own = None if importance is None else importance[number, None]
        scales.append(rounding.scales(group.values(), own))
        one = tuple(part[:, 0] for part in scales[-1])  # (R, 1) each
        for index in range(size):
            code = rounding.codes(group.column(index), one)
            group.settle(index, rounding.decode(code, one))
            codes.append(code)
        group.spread()
    joined = np.concatenate(codes, axis=-1).reshape(groups.shape)
    return joined, tuple(np.concatenate(parts, axis=1) for parts in zip(*scales, strict=True))


def _joined(parts: list[QuantisedRows]) -> QuantisedRows:
    if len(parts) == 1:
        return parts[0]
    biases = [part.biases for part in parts if part.biases is not None]
    return QuantisedRows(
        np.concatenate([part.weight for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(biases) if biases else None,
    )


def round_trip(matrix: mx.array, method: QuantisationMethod) -> mx.array:
    """matrix (..., in_dims) quantised and back, in its own dtype."""
    flat = np.asarray(as_numpy(matrix.astype(mx.float32)), dtype=np.float32)
    rows, _ = quantise(flat.reshape(-1, flat.shape[-1]), method)
    return unpacked(rows, method).reshape(matrix.shape).astype(matrix.dtype)


def sampled_error(sample: Floats, method: QuantisationMethod) -> ErrorStats:
    """Of rows (R, in_dims) that stand for the whole matrix."""
    return quantise(sample, method)[1]


def unpacked(rows: QuantisedRows, method: QuantisationMethod) -> mx.array:
    """(R, in_dims) float32."""
    form = method.form
    affine = rows.biases is not None
    scales = widen(rows.scales, method.dtype) if affine else rows.scales
    biases = None if rows.biases is None else mx.array(widen(rows.biases, method.dtype))
    return dequantised(mx.array(rows.weight), mx.array(scales), biases, form)


def dequantised(
    weight: mx.array, scales: mx.array, biases: mx.array | None, form: MLXFormat
) -> mx.array:
    """As MLX unpacks it, (..., in_dims) float32."""
    return mx.dequantize(
        weight, scales, biases, form.group_size, form.bits, form.mode, dtype=mx.float32
    )
