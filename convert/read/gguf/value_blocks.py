"""Block formats that no MLX format holds: Q2_K, Q3_K and Q6_K (groups of 16), IQ4_NL, IQ4_XS.

Each function takes blocks (n, num_bytes) uint8 and gives values (n, num_values) float32, each
rounded as llama.cpp rounds it. Source: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h.
"""

import numpy as np

from ..stored import Array
from .affine_blocks import half, nibbles

_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_CODEBOOK = np.array(  # of IQ4: sixteen levels, closer around zero
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _quarters(octets: Array) -> Array:
    """(n, k * 32) bytes -> (n, k * 128): of every 32 bytes the lowest pairs of bits first."""
    spread = octets.reshape(len(octets), -1, 1, 32) >> _PAIRS
    return (spread & 3).reshape(len(octets), -1)


def _by_group(codes: Array, scales: Array) -> Array:
    """Codes (n, groups * size) times scales (n, groups)."""
    groups = codes.reshape(*scales.shape, -1).astype(np.float32)
    return (groups * scales[..., None]).reshape(len(codes), -1)


def _q2_k(blocks: Array) -> Array:
    factors, codes = blocks[:, :16], _quarters(blocks[:, 16:80])
    steps = half(blocks[:, 80:82]) * (factors & 15)
    minima = half(blocks[:, 82:84]) * (factors >> 4)
    return _by_group(codes, steps) - np.repeat(minima, 16, axis=1)


def _q3_k(blocks: Array) -> Array:
    """Where the bit in the mask is not set, four is to be subtracted."""
    mask = blocks[:, :32].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]
    codes = _quarters(blocks[:, 32:96]).astype(np.int8)
    codes -= 4 * (1 - (mask & 1).reshape(len(blocks), -1).astype(np.int8))
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    factors = np.concatenate([low & 15, low >> 4], axis=1)
    factors |= ((high[:, None, :] >> _PAIRS) & 3).reshape(len(blocks), 16) << 4
    return _by_group(codes, half(blocks[:, 108:]) * (factors.astype(np.float32) - 32))


def _q6_k(blocks: Array) -> Array:
    low, high = nibbles(blocks[:, :128], 64), _quarters(blocks[:, 128:192])
    codes = (low | (high << 4)).astype(np.int8) - np.int8(32)
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _by_group(codes, half(blocks[:, 208:]) * factors)


def _iq4_nl(blocks: Array) -> Array:
    return half(blocks[:, :2]) * _CODEBOOK[nibbles(blocks[:, 2:], 16)]


def _iq4_xs(blocks: Array) -> Array:
    """Six-bit factors: two to a byte below, and two bits each in a word above."""
    words = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = (words >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    factors = (low | (high << 4)).astype(np.float32) - 32
    levels = _CODEBOOK[nibbles(blocks[:, 8:], 16)]
    return _by_group(levels, half(blocks[:, :2]) * factors)


VALUES = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}
