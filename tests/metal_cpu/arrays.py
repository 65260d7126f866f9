"""MLX arrays to bytes and back. Knows no kernel."""

import mlx.core as mx
import numpy as np

ALIGNMENT = 256  # of buffers, in bytes

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def to_bytes(array: mx.array) -> Bytes:
    """The elements in row-contiguous order, read-only."""
    flat = mx.contiguous(array).reshape(-1)
    if array.dtype == mx.bfloat16:
        flat = flat.view(mx.uint16)
    return np.asarray(flat).view(np.uint8)


def scalar(value: float | int, dtype: type[np.generic]) -> Bytes:
    """One number."""
    return np.array([value], dtype).view(np.uint8)


def to_mlx(data: Bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """A copy, as an array of this shape."""
    return mx.array(data).view(dtype).reshape(shape) if data.size else mx.zeros(shape, dtype)


def aligned(num_bytes: int, alignment: int, *, fill: int = 0) -> Bytes:
    """Fresh memory at a multiple of `alignment` that is one of no higher power of two."""
    margin = 2 * max(alignment, ALIGNMENT)
    room = np.full(num_bytes + 2 * margin, fill, np.uint8)
    start = -room.ctypes.data % margin
    if alignment < ALIGNMENT:
        start += alignment
    return room[start : start + num_bytes]


def row_strides(shape: tuple[int, ...]) -> list[int]:
    """Of a row-contiguous array, in elements."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return strides[::-1][: len(shape)] if shape else []
