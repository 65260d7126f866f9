"""Numpy views of MLX arrays, 16-bit floats in numpy, and codes packed into 32-bit words.

numpy has no bfloat16: its numbers are held as uint16 and widened to float32. Worker threads use
numpy only; MLX is used by the thread that reads.

A packed row is one little-endian stream of bits, least significant bit first: number i occupies the
bits from i * bits on, and 32 codes of b bits fill b words. MLX, GPTQ and compressed-tensors agree
on this.
"""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RAW = {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)} | {
    "float32": np.dtype(np.float32)
}


def widen(raw: NDArray[np.generic], dtype: str) -> Floats:
    """Numbers as they lie on the disk in `dtype` (bfloat16 as uint16) -> float32."""
    if dtype == "bfloat16":
        wide: NDArray[np.uint32] = raw.astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)
    return np.asarray(raw, dtype=np.float32)


def narrow(values: Floats, dtype: str) -> NDArray[np.generic]:
    """float32 -> as it lies on disk, to the nearest, ties to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype(np.uint16)
    return values.astype(RAW[dtype])


def rounded(values: Floats, dtype: str) -> Floats:
    """float32 values that `dtype` holds exactly."""
    return widen(narrow(values, dtype), dtype)


_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32, "int64": mx.int64}


def as_numpy(array: mx.array) -> NDArray[np.generic]:
    """The array's own bytes, bfloat16 as uint16."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    mx.eval(array)
    view: NDArray[np.generic] = np.array(array, copy=False)
    return view


def mx_dtype(name: str) -> mx.Dtype:
    return _DTYPES[name]


def dtype_name(array: mx.array) -> str:
    return next(name for name, dtype in _DTYPES.items() if dtype == array.dtype)


Codes = NDArray[np.uint8]
Words = NDArray[np.uint32]


def pack(codes: Codes, bits: int) -> Words:
    """codes (R, n) below 2**bits, n a multiple of 32 -> (R, n * bits / 32)."""
    rows = len(codes)
    codes = np.ascontiguousarray(codes)
    if bits == 8:
        return codes.view(np.uint32)
    if bits == 4:
        pairs = codes.view("<u2")
        return (pairs | (pairs >> np.uint16(4))).astype(np.uint8).view(np.uint32)
    eights = codes.view("<u8")  # (R, n / 8)
    for width, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0xFFFFFFFF)):
        gap = np.uint64(width - width // 8 * bits)  # between two that are joined
        low = eights & np.uint64(mask)
        eights = low | ((eights ^ low) >> gap)
    octets = eights.view(np.uint8).reshape(rows, -1, 8)
    return np.ascontiguousarray(octets[:, :, :bits]).reshape(rows, -1).view(np.uint32)


def unpack(words: Words, bits: int, count: int) -> Codes:
    """The first `count` numbers of each row: (..., num_words) uint32 -> (..., count) uint8."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[..., :count]
    if bits in (1, 2, 4):
        per_byte = 8 // bits
        codes = np.empty((*octets.shape, per_byte), np.uint8)
        for index in range(per_byte):
            codes[..., index] = (octets >> (index * bits)) & ((1 << bits) - 1)
    else:
        codes = _unpack_odd(octets, bits)
    return codes.reshape(*words.shape[:-1], -1)[..., :count]


def _unpack_odd(octets: Codes, bits: int) -> Codes:
    """Eight numbers from each `bits` bytes; bytes at the end that make no eight count as zero."""
    short = -octets.shape[-1] % bits
    if short:
        octets = np.concatenate([octets, np.zeros((*octets.shape[:-1], short), np.uint8)], axis=-1)
    groups = octets.reshape(*octets.shape[:-1], -1, bits)
    whole = np.zeros(groups.shape[:-1], np.uint64)
    for index in range(bits):
        whole |= groups[..., index].astype(np.uint64) << np.uint64(8 * index)
    codes = np.empty((*whole.shape, 8), np.uint8)
    for index in range(8):
        codes[..., index] = (whole >> np.uint64(index * bits)) & np.uint64((1 << bits) - 1)
    return codes
