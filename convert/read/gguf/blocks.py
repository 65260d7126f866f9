"""Block formats of GGUF files -> codes with scales, or values.

AFFINE: formats that MLX's affine quantisation holds, Q4_0 to Q8_0, Q4_K and Q5_K. Each function
takes blocks (n, num_bytes) uint8 and gives codes (n, num_values) uint8, scales and biases
(n, num_values / 32) float32, exact.
values_of(): formats that no MLX format holds, Q2_K, Q3_K and Q6_K (groups of 16), IQ4_NL and
IQ4_XS, and those with tables of their own, IQ1 to IQ3 and ternary, which the `gguf` package knows.
Each function gives values (n, num_values) float32, rounded as llama.cpp rounds them.
In a block of 32, the low halves of the bytes are the first 16 values.
Source: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h.
"""

from collections.abc import Callable

import numpy as np

from ....errors import UnsupportedModelError
from ..stored import Array

Decoded = tuple[Array, Array, Array]


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


def _q4_0(blocks: Array) -> Decoded:
    scale = half(blocks[:, :2])
    return nibbles(blocks[:, 2:], 16), scale, -8 * scale


def _q4_1(blocks: Array) -> Decoded:
    return nibbles(blocks[:, 4:], 16), half(blocks[:, :2]), half(blocks[:, 2:4])


def _q5_0(blocks: Array) -> Decoded:
    scale = half(blocks[:, :2])
    return nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Array) -> Decoded:
    codes = nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, half(blocks[:, :2]), half(blocks[:, 2:4])


def _q8_0(blocks: Array) -> Decoded:
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


def _q4_k(blocks: Array) -> Decoded:
    return nibbles(blocks[:, 16:], 32), *_scales_k(blocks)


def _q5_k(blocks: Array) -> Decoded:
    """Bit g of byte i is the fifth bit of value i of group g."""
    places = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((places & 1) << 4).reshape(len(blocks), -1)
    return nibbles(blocks[:, 48:], 32) | fifth, *_scales_k(blocks)


AFFINE: dict[str, tuple[int, Callable[[Array], Decoded]]] = {  # bits, and the function
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (5, _q5_0),
    "Q5_1": (5, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q5_K": (5, _q5_k),
}


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
_TABLES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")


def values_of(kind: str, label: str) -> Callable[[Array], Array]:
    """The function that makes values of the blocks of a format.

    Raises:
        UnsupportedModelError: a format that is not read, or that needs the `gguf` package.
    """
    if kind in VALUES:
        return VALUES[kind]
    if kind not in _TABLES:
        read = ", ".join([*AFFINE, *VALUES, "MXFP4", *_TABLES])
        raise UnsupportedModelError(
            f"{label} is {kind}, which is not read; read are F32, F16, BF16, {read}. Use another "
            "file of this model."
        )
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise UnsupportedModelError(
            f'{label} is {kind}, whose tables are in another package: pip install "mlxinfer[gguf]".'
        ) from None
    return lambda blocks: quants.dequantize(blocks, GGMLQuantizationType[kind])
