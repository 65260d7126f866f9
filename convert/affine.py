"""Affine codes, with the scale and bias of each group chosen by squared error.

MLX takes the minimum and maximum of a group, so one outlier widens every step. Here a group is put
on a few grids: its range is cut by a factor, and shifted by a share of a step. For the nearest
codes on each grid, a linear regression gives the best scale and bias, and sums give their error
(llama.cpp chooses the scales of its K-quants so). New codes for the best line, fitted again, cannot
raise the error. If rounding scale and bias for the file would cost much, as in groups far from
zero, the extremes are tried too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, rounded

# Shares of a group's range, by bits and group size, and shifts of the grid. Of three shifts of one
# cut the best has 3 to 5 % less squared error than the best of three cuts without a shift.
CUTS = {
    2: {32: 0.75, 64: 0.65, 128: 0.6},
    3: {32: 0.92, 64: 0.87, 128: 0.82},
    4: {32: 0.99, 64: 0.97, 128: 0.94},
    5: {32: 1.01, 64: 1.0, 128: 0.98},
    6: {32: 1.01, 64: 1.0, 128: 0.99},
    8: {32: 1.005, 64: 1.005, 128: 1.005},
}
SHIFTS = (0.3, -0.3)  # of a step; the grid without a shift is tried first
ROUGH = 0.1  # of the squared error: what rounding scale and bias may add unless extremes are tried
TINY = np.float32(1e-7)  # the smallest scale, as in MLX; float16 holds it


def by_extremes(groups: Floats, bits: int, dtype: str) -> tuple[Floats, Floats]:
    """Scale and bias (..., 1) as mx.quantize chooses them, for groups (..., group_size).

    The extreme that is further from zero is met exactly, and so is zero.
    """
    return _as_mlx(*extremes(groups), bits, dtype)


def extremes(groups: Floats) -> tuple[Floats, Floats]:
    """Minimum and maximum of contiguous groups (..., group_size), (..., 1) each.

    The floats are compared as integers, which takes a third of the time. The largest integer is the
    maximum if any float is positive. The largest unsigned integer is the minimum if any float is
    negative.
    """
    starts = np.arange(0, groups.size, groups.shape[-1])
    shape = (*groups.shape[:-1], 1)
    flat = groups.reshape(-1)
    low = np.maximum.reduceat(flat.view(np.uint32), starts)
    high = np.maximum.reduceat(flat.view(np.int32), starts)
    bounds = low.view(np.float32), high.view(np.float32)
    if np.signbit(bounds[1]).any() or not np.signbit(bounds[0]).all():
        bounds = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
    return bounds[0].reshape(shape), bounds[1].reshape(shape)


def _as_mlx(low: Floats, high: Floats, bits: int, dtype: str) -> tuple[Floats, Floats]:
    from_low = np.abs(low) > np.abs(high)
    edge = np.where(from_low, low, high)
    step = np.maximum((high - low) / np.float32(2**bits - 1), TINY)
    step = np.where(from_low, step, -step)
    count = np.rint(edge / step)
    scale = np.where(count != 0, edge / np.where(count != 0, count, 1), step)
    return rounded(scale, dtype), rounded(np.where(count != 0, edge, 0), dtype)


def search(
    groups: Floats, bits: int, dtype: str, importance: Floats | None, refinements: int = 0
) -> tuple[Floats, Floats]:
    """Scale and bias (..., 1), representable in `dtype`, of little squared error.

    Args:
        groups: (R, G, group_size).
        importance: (G, group_size) weights of the squares; None: all alike.
        refinements: rounds of new codes for the best scale and bias, and the best of both for
            these. The first takes 1 to 2 % off the error and a third more time.
    """
    low, high = extremes(groups)
    scale, bias, rough = _Grid.of(groups, low, high, bits, importance).best(dtype, refinements)
    few = rough[..., 0]
    if few.any():  # (1, M, ...): those groups alone
        weights = None if importance is None else np.broadcast_to(importance, groups.shape)[few]
        sampled, searched = groups[few][None], (scale[few][None], bias[few][None])
        extreme = _as_mlx(low[few][None], high[few][None], bits, dtype)
        ours, theirs = (error_of(sampled, *pair, bits, weights) for pair in (searched, extreme))
        for values, inner, outer in zip((scale, bias), searched, extreme, strict=True):
            values[few] = np.where(theirs < ours, outer, inner)[0]
    return scale, bias


def encode(groups: Floats, scale: Floats, bias: Floats, bits: int) -> Floats:
    """The nearest codes, as float32 of the shape of `groups`."""
    codes: Floats = groups - bias
    codes *= np.float32(1.0) / scale
    np.rint(codes, out=codes)
    np.clip(codes, 0, 2**bits - 1, out=codes)
    return codes


def error_of(
    groups: Floats, scale: Floats, bias: Floats, bits: int, importance: Floats | None
) -> Floats:
    """Sum of the weighted squared errors of each group, (..., 1)."""
    errors = encode(groups, scale, bias, bits)
    errors *= scale
    errors += bias
    errors -= groups
    weighted = errors if importance is None else errors * importance
    return np.einsum("rgk,rgk->rg", weighted, errors)[..., None]


@dataclass(slots=True)
class _Line:
    """places = slope * codes + offset, for the codes of each group; (..., 1) all."""

    gain: Floats  # what it takes off the squared error of a constant
    slope: Floats
    mean: Floats  # of the codes

    def keep_better(self, other: "_Line") -> None:
        better = other.gain > self.gain
        np.copyto(self.gain, other.gain, where=better)
        np.copyto(self.slope, other.slope, where=better)
        np.copyto(self.mean, other.mean, where=better)


@dataclass(slots=True)
class _Grid:
    """Groups on a scale of steps, 0 being a cut range's lower end."""

    places: Floats  # (R, G, group_size), as scratch
    zero: Floats  # (R, G, 1), as all below: what place 0 stands for
    step: Floats
    largest: int  # code
    importance: Floats | None
    weight: Floats  # (1, G, 1), or (1, 1, 1)
    mean: Floats
    variance: Floats  # times the weight
    scratch: Floats

    @classmethod
    def of(
        cls, groups: Floats, low: Floats, high: Floats, bits: int, importance: Floats | None
    ) -> "_Grid":
        largest, size = 2**bits - 1, groups.shape[-1]
        step = np.maximum((high - low) * np.float32(CUTS[bits][size] / largest), TINY)
        zero = (low + high) * np.float32(0.5) - step * np.float32(largest / 2)
        places = groups - zero
        places *= np.float32(1) / step
        scratch = np.empty_like(places)
        if importance is None:
            weight, weighted = np.full((1, 1, 1), size, np.float32), places
        else:
            weight = np.maximum(importance.sum(axis=-1, keepdims=True), TINY)[None]
            weighted = np.multiply(places, importance, out=scratch)
        mean: Floats = _total(weighted) / weight
        variance: Floats = _products(weighted, places) - mean * mean * weight
        return cls(places, zero, step, largest, importance, weight, mean, variance, scratch)

    def best(self, dtype: str, refinements: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Scale and bias as `dtype` holds them, and where that costs much."""
        best = self._line(self.places)
        for shift in SHIFTS:
            best.keep_better(self._line(np.add(self.places, np.float32(shift), out=self.scratch)))
        for _ in range(refinements):
            moved = np.subtract(self.places, self._offset(best), out=self.scratch)
            moved *= np.float32(1) / best.slope
            best.keep_better(self._line(moved))
        offset = self._offset(best)
        scale = rounded(np.maximum(best.slope * self.step, TINY), dtype)
        bias = rounded(self.zero + offset * self.step, dtype)
        half = np.float32(self.largest / 2)
        turn = (scale / self.step - best.slope) * half  # what rounding moves the ends by, and
        move = (bias - self.zero) / self.step - offset + turn  # the middle
        lost = (move * move + turn * turn * np.float32(1 / 3)) * self.weight
        return scale, bias, lost > ROUGH * (self.variance - best.gain)

    def _line(self, places: Floats) -> _Line:
        codes: Floats = np.rint(places, out=self.scratch)
        np.clip(codes, 0, self.largest, out=codes)
        weighted = codes if self.importance is None else codes * self.importance
        total = _total(weighted)
        shared = _products(weighted, self.places) - total * self.mean
        mean = total / self.weight
        total *= mean
        spread = _products(weighted, codes) - total
        slope = np.maximum(shared / np.maximum(spread, TINY), TINY)
        return _Line(shared * slope, slope, mean)

    def _offset(self, line: _Line) -> Floats:
        return self.mean - line.slope * line.mean


def _total(values: Floats) -> Floats:
    sums: Floats = np.einsum("rgk->rg", values)[..., None]
    return sums


def _products(left: Floats, right: Floats) -> Floats:
    sums: Floats = np.einsum("rgk,rgk->rg", left, right)[..., None]
    return sums
