"""Block formats that are codes with a scale and a bias for 32 values: Q4_0 to Q8_0, Q4_K, Q5_K.

Each function takes blocks (n, num_bytes) uint8 and gives codes (n, num_values) uint8, scales and
biases (n, num_values / 32) float32, exact. In a block of 32, the low halves of the bytes are the
first 16 values. Source: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..stored import Array

Triple = tuple[Array, Array, Array]


@dataclass(frozen=True, slots=True)
class AffineBlocks:
    """A format that MLX's affine quantisation holds."""

    bits: int
    decode: Callable[[Array], Triple]
    half_scales: bool  # scales and biases are exact in float16


def half(octets: Array) -> Array:
    """(n, 2 k) bytes of little-endian float16 -> (n, k) float32."""
    return np.ascontiguousarray(octets).view("<f2").astype(np.float32)


def nibbles(octets: Array, width: int) -> Array:
    """(n, k * width) bytes -> (n, 2 k * width): low halves of `width` bytes, then the high ones."""
    groups = octets.reshape(len(octets), -1, 1, width)
    return np.concatenate([groups & 0xF, groups >> 4], axis=2).reshape(len(octets), -1)


def _fifth_bits(octets: Array) -> Array:
    """(n, 4) bytes -> (n, 32): bit i of the word for value i, where the fifth bit belongs."""
    return np.unpackbits(octets, axis=1, bitorder="little") << 4


def _q4_0(blocks: Array) -> Triple:
    scale = half(blocks[:, :2])
    return nibbles(blocks[:, 2:], 16), scale, -8 * scale


def _q4_1(blocks: Array) -> Triple:
    return nibbles(blocks[:, 4:], 16), half(blocks[:, :2]), half(blocks[:, 2:4])


def _q5_0(blocks: Array) -> Triple:
    scale = half(blocks[:, :2])
    return nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Array) -> Triple:
    codes = nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, half(blocks[:, :2]), half(blocks[:, 2:4])


def _q8_0(blocks: Array) -> Triple:
    scale = half(blocks[:, :2])
    return blocks[:, 2:] ^ np.uint8(128), scale, -128 * scale


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """(n, 12) bytes -> the eight scales and eight minima of a super-block, (n, 8) each.

    The first four of each lie in the low six bits of bytes 0 to 3 and 4 to 7; the low halves of the
    others in bytes 8 to 11 (scale below, minimum above), their top bits above the first four.
    """
    low, high, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=1)
    return scales, minima


def _scales_k(blocks: Array) -> tuple[Array, Array]:
    steps, minima = _six_bits(blocks[:, 4:16])
    return half(blocks[:, :2]) * steps, -half(blocks[:, 2:4]) * minima


def _q4_k(blocks: Array) -> Triple:
    return nibbles(blocks[:, 16:], 32), *_scales_k(blocks)


def _q5_k(blocks: Array) -> Triple:
    """Bit g of byte i is the fifth bit of value i of group g."""
    places = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((places & 1) << 4).reshape(len(blocks), -1)
    return nibbles(blocks[:, 48:], 32) | fifth, *_scales_k(blocks)


AFFINE = {
    "Q4_0": AffineBlocks(4, _q4_0, True),
    "Q4_1": AffineBlocks(4, _q4_1, True),
    "Q5_0": AffineBlocks(5, _q5_0, True),
    "Q5_1": AffineBlocks(5, _q5_1, True),
    "Q8_0": AffineBlocks(8, _q8_0, True),
    "Q4_K": AffineBlocks(4, _q4_k, False),
    "Q5_K": AffineBlocks(5, _q5_k, False),
}
