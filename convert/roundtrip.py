"""A matrix as it would come back from a format, and the error of that, without any file."""

import mlx.core as mx
import numpy as np

from .arrays import as_numpy
from .numbers import Floats, widen
from .quantise import Error, Method, Rows, quantise


def after(matrix: mx.array, method: Method) -> mx.array:
    """matrix (..., in_dims) quantised and back, in its own dtype."""
    flat = np.asarray(as_numpy(matrix.astype(mx.float32)), dtype=np.float32)
    rows, _ = quantise(flat.reshape(-1, flat.shape[-1]), method)
    return unpacked(rows, method).reshape(matrix.shape).astype(matrix.dtype)


def sampled_error(sample: Floats, method: Method) -> Error:
    """Of rows (R, in_dims) that stand for the whole matrix."""
    return quantise(sample, method)[1]


def unpacked(rows: Rows, method: Method) -> mx.array:
    """(R, in_dims) float32."""
    form = method.form
    parts = [mx.array(rows.weight)]
    if rows.biases is None:
        parts.append(mx.array(rows.scales))
    else:
        parts += [mx.array(widen(part, method.dtype)) for part in (rows.scales, rows.biases)]
    return mx.dequantize(
        *parts,
        group_size=form.group_size,
        bits=form.bits,
        mode=form.mode,
        dtype=mx.float32,
    )
