"""Affine codes, with the scale and bias of each group chosen by squared error.

MLX takes a group's minimum and maximum, so one outlier widens every step. Here the range is cut by
several factors; each cut gives codes; the best scale and bias for those codes are a linear
regression, whose error follows from the sums (llama.cpp chooses the scales of its K-quants so). Two
rounds of new codes and a new regression follow, which cannot raise the error. The result, rounded
to what the file holds, is compared with the extremes: the choice is never worse than theirs.
"""

from collections.abc import Iterator

import numpy as np

from .arrays import Codes, Floats, rounded

# Shares of a group's range, by bits: the fewer the codes, the more there is to gain by a cut. A
# third one at 3 and 4 bits takes a third more time and lessens the squared error by 0.1 % at most.
CUTS = {
    2: (0.92, 0.76, 0.6),
    3: (0.94, 0.82),
    4: (1.0, 0.92),
    5: (1.0, 0.95),
}
REFINEMENTS = 2  # rounds of new codes for the best scale and bias, and the best of both for these
STRETCH = (1.0, 1.0 + 2**-8, 1.0 + 2**-7)  # from 6 bits on rounding scale and bias costs most
TINY = np.float32(1e-7)  # the smallest scale, as in MLX; float16 holds it


def by_extremes(groups: Floats, bits: int, dtype: str) -> tuple[Floats, Floats]:
    """Scale and bias (..., 1) as mx.quantize chooses them, for groups (..., group_size).

    The extreme that is further from zero is met exactly, and zero is.
    """
    return _as_mlx(*extremes(groups), bits, dtype)


def extremes(groups: Floats) -> tuple[Floats, Floats]:
    """Minimum and maximum of contiguous groups (..., group_size), (..., 1) each."""
    size = groups.shape[-1]
    starts = np.arange(0, groups.size, size)
    shape = (*groups.shape[:-1], 1)
    flat = groups.reshape(-1)  # reduceat takes two thirds of the time that min(axis=-1) does
    return (
        np.minimum.reduceat(flat, starts).reshape(shape),
        np.maximum.reduceat(flat, starts).reshape(shape),
    )


def _as_mlx(low: Floats, high: Floats, bits: int, dtype: str) -> tuple[Floats, Floats]:
    from_low = np.abs(low) > np.abs(high)
    edge = np.where(from_low, low, high)
    step = np.maximum((high - low) / np.float32(2**bits - 1), TINY)
    step = np.where(from_low, step, -step)
    count = np.rint(edge / step)
    scale = np.where(count != 0, edge / np.where(count != 0, count, 1), step)
    return rounded(scale, dtype), rounded(np.where(count != 0, edge, 0), dtype)


def search(
    groups: Floats, bits: int, dtype: str, importance: Floats | None
) -> tuple[Floats, Floats]:
    """Scale and bias (..., 1), representable in `dtype`, of least squared error.

    Args:
        groups: (R, G, group_size).
        importance: (G, group_size) weights of the squares; None: all alike.
    """
    low, high = extremes(groups)
    scratch = np.empty_like(groups)  # allocating it anew for each try takes longer than the try
    best_scale, best_bias = _as_mlx(low, high, bits, dtype)
    best_error = error_of(groups, best_scale, best_bias, bits, importance, scratch)
    for scale, bias in _candidates(groups, low, high - low, bits, dtype, importance, scratch):
        error = error_of(groups, scale, bias, bits, importance, scratch)
        better = error < best_error
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_bias, bias, where=better)
        np.copyto(best_error, error, where=better)
    return best_scale, best_bias


def encode(
    groups: Floats, scale: Floats, bias: Floats, bits: int, out: Floats | None = None
) -> Floats:
    """The nearest codes, as float32 of the shape of `groups`, in `out` if it is given."""
    codes: Floats = np.subtract(groups, bias, out=out)
    codes *= np.float32(1.0) / scale
    np.rint(codes, out=codes)
    np.clip(codes, 0, 2**bits - 1, out=codes)
    return codes


def as_codes(codes: Floats) -> Codes:
    """float32 -> uint8."""
    return codes.astype(np.uint8)


def error_of(
    groups: Floats,
    scale: Floats,
    bias: Floats,
    bits: int,
    importance: Floats | None,
    scratch: Floats | None = None,
) -> Floats:
    """Sum of the weighted squared errors of each group, (..., 1)."""
    found = encode(groups, scale, bias, bits, scratch)
    found *= scale
    found += bias
    found -= groups
    return _weighted_sum(found, found, importance)


def _candidates(
    groups: Floats,
    low: Floats,
    span: Floats,
    bits: int,
    dtype: str,
    importance: Floats | None,
    scratch: Floats,
) -> Iterator[tuple[Floats, Floats]]:
    if bits in CUTS:
        scale, bias = _regressed(groups, low, span, bits, importance, scratch)
        yield rounded(scale, dtype), rounded(bias, dtype)
        return
    step = np.maximum(span / np.float32(2**bits - 1), TINY)
    for factor in STRETCH:
        scale = rounded(step * np.float32(factor), dtype)
        spare = np.maximum(scale * np.float32(2**bits - 1) - span, 0)
        yield scale, rounded(low, dtype)
        yield scale, rounded(low - spare / 2, dtype)  # what is to spare at both ends


def _regressed(
    groups: Floats,
    low: Floats,
    span: Floats,
    bits: int,
    importance: Floats | None,
    scratch: Floats,
) -> tuple[Floats, Floats]:
    """The best cut's scale and bias, in float32."""
    middle: Floats = low + span * np.float32(0.5)
    centred: Floats = groups - middle  # small numbers: the sums below then lose nothing
    weight, mean, square = _moments(centred, importance)
    best: tuple[Floats, Floats, Floats] | None = None
    for cut in CUTS[bits]:
        step = np.maximum(span * np.float32(cut / (2**bits - 1)), TINY)
        codes = encode(centred, step, -span * np.float32(cut / 2), bits, scratch)
        found = _line(centred, codes, importance, weight, mean, square)
        if best is None:
            best = found
            continue
        _keep_better(best, found)
    assert best is not None
    for _ in range(REFINEMENTS):
        codes = encode(centred, best[1], best[2], bits, scratch)
        _keep_better(best, _line(centred, codes, importance, weight, mean, square))
    _, scale, bias = best
    return scale, bias + middle


def _keep_better(best: tuple[Floats, ...], found: tuple[Floats, ...]) -> None:
    """Replace the best scale and bias of each group where the new ones have a smaller error."""
    better = found[0] < best[0]
    for kept, new in zip(best, found, strict=True):
        np.copyto(kept, new, where=better)


def _line(
    values: Floats,
    codes: Floats,
    importance: Floats | None,
    weight: Floats,
    mean: Floats,
    square: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Weighted regression values = scale * codes + bias: its squared error, scale and bias."""
    code_weight, code_mean, code_square = _moments(codes, importance)
    product = _weighted_sum(codes, values, importance)
    spread = np.maximum(code_square - code_mean * code_mean * code_weight, TINY)
    shared = product - code_mean * mean * weight
    scale: Floats = np.maximum(shared / spread, TINY)
    bias: Floats = mean - scale * code_mean
    error: Floats = (square - mean * mean * weight) - shared * scale
    return error, scale, bias


def _moments(values: Floats, importance: Floats | None) -> tuple[Floats, Floats, Floats]:
    """Weight, weighted mean and weighted sum of squares of each group, (..., 1)."""
    if importance is None:
        weight = np.full((1, 1, 1), values.shape[-1], np.float32)
        total: Floats = np.einsum("rgk->rg", values)[..., None]
    else:
        weight = np.maximum(importance.sum(axis=-1, keepdims=True), TINY)[None]
        total = np.einsum("rgk,gk->rg", values, importance)[..., None]
    return weight, total / weight, _weighted_sum(values, values, importance)


def _weighted_sum(left: Floats, right: Floats, importance: Floats | None) -> Floats:
    """Sum of left * right over each group, (..., 1)."""
    if importance is None:
        return np.einsum("rgk,rgk->rg", left, right)[..., None]
    return np.einsum("rgk,rgk->rg", left * importance, right)[..., None]
