"""Block formats of GGUF files -> codes with scales, or values.

AFFINE: formats that MLX's affine quantisation holds, Q4_0 to Q8_0, Q4_K and Q5_K. Each function
takes blocks (n, num_bytes) uint8 and gives codes (n, num_values) uint8, scales and biases
(n, num_values / 32) float32, exact. In a block of 32, the low halves of the bytes are the first 16
values. Source: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h.

values_of(): all others, as the `gguf` package reads them: no MLX format holds them.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType, quants

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


_VALUES = frozenset(
    ("Q2_K", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")
) | {"IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"}


def values_of(kind: str, label: str) -> Callable[[Array], Array]:
    """The function that makes values (n, num_values) float32 of the blocks of a format.

    Raises:
        UnsupportedModelError: a format that is not read.
    """
    if kind not in _VALUES:
        read = ", ".join([*AFFINE, "MXFP4", *sorted(_VALUES)])
        raise UnsupportedModelError(
            f"{label} is {kind}, which is not read; read are F32, F16, BF16, {read}. Use another "
            "file of this model."
        )
    return lambda blocks: quants.dequantize(blocks, GGMLQuantizationType[kind])
