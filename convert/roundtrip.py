"""A matrix as it would come back from a format, and the error of that, without any file."""

import mlx.core as mx
import numpy as np

from .arrays import as_numpy
from .numbers import Floats, widen
from .quantise import Error, Method, Rows, quantise
from .read import MLXFormat


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
