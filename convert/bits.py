"""Codes of 2 to 8 bits into 32-bit words, as MLX packs them. Knows no scales.

A row is one little-endian stream of bits, least significant bit first; 32 codes of b bits fill b
words (checked against mx.dequantize by the tests).
"""

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Words = NDArray[np.uint32]


def pack(codes: Codes, bits: int) -> Words:
    """codes (R, n) below 2**bits, n a multiple of 32 -> (R, n * bits / 32)."""
    rows, count = codes.shape
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        pairs = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
        return np.ascontiguousarray(pairs).view(np.uint32)
    if bits == 2:
        low = codes[:, 0::4] | (codes[:, 1::4] << np.uint8(2))
        high = (codes[:, 2::4] << np.uint8(4)) | (codes[:, 3::4] << np.uint8(6))
        return np.ascontiguousarray(low | high).view(np.uint32)
    return _pack_across_bytes(codes.reshape(rows, count // 8, 8), bits)


def _pack_across_bytes(eights: Codes, bits: int) -> Words:
    """Eight codes of 3, 5 or 6 bits fill `bits` bytes."""
    rows, count, _ = eights.shape
    stream = np.zeros((rows, count), np.uint64)
    for index in range(8):
        stream |= eights[:, :, index].astype(np.uint64) << np.uint64(bits * index)
    as_bytes = stream.astype("<u8").view(np.uint8).reshape(rows, count, 8)[:, :, :bits]
    return np.ascontiguousarray(as_bytes).reshape(rows, count * bits).view(np.uint32)
