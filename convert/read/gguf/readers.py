"""Readers of GGUF tensors: blocks to values or codes, in the order of transformers (layout.py).

AFFINE has the formats that MLX's affine quantisation holds: Q4_0 to Q8_0, Q4_K and Q5_K. Each of
its functions takes blocks (n, num_bytes) uint8. It gives codes (n, num_values) uint8, and exact
scales and biases (n, num_values / 32) float32. In a block of 32, the low halves of the bytes are
the first 16 values. Source: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h.

No MLX format holds the others. `values_of` reads them with the `gguf` package.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants

from ....errors import UnsupportedModelError
from ...arrays import pack
from ..codes import AffineMatrix, Octets, Triple, affine_format, float_reader
from ..schemes.floats import MXFP4
from ..source import MLXFormat, SourceTensor, TensorReader
from ..stored import FLOATS, Array, StoredArray, to_float32, to_mlx
from .header import BlockType, TensorEntry
from .layout import PLAIN, Order, TensorLayout

Decoded = tuple[Array, Array, Array]
Entry = tuple[TensorEntry, StoredArray]  # a tensor of a file, and where its bytes are


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
) | {"IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4"}


def values_of(kind: str, label: str) -> Callable[[Array], Array]:
    """The function that makes rows of values (..., in_dims) float32 of rows of a format's bytes.

    It takes 16 rows at a time, so rows of single blocks are slow.
    """
    if kind not in _VALUES:
        read = ", ".join([*AFFINE, "MXFP4", *sorted(_VALUES)])
        raise UnsupportedModelError(
            f"{label} is {kind}, which is not read; read are F32, F16, BF16, {read}. Use another "
            "file of this model."
        )
    return lambda rows: quants.dequantize(rows, GGMLQuantizationType[kind])


# -- readers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file, and how its values become those of transformers."""

    name: str
    array: StoredArray  # floats, or (..., bytes of a row) U8
    stored: tuple[int, ...]  # shape of the values, as in the file
    block: BlockType
    layout: TensorLayout = PLAIN
    scale: Array | None = None  # (1,) or one for each matrix of a stack: what values are times

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.layout.shape or self.stored
        return shape if self.layout.rows is None else (len(self.layout.rows), *shape[1:])

    def part(self, index: int) -> "GGUFTensor":
        size = self.array.num_bytes // self.stored[0]
        array = replace(
            self.array, shape=self.array.shape[1:], offset=self.array.offset + index * size
        )
        return replace(self, array=array, stored=self.stored[1:])

    def rows(self, rows: slice) -> Array:
        if self.layout.rows is None:
            whole = len(self.stored) != len(self.shape) and self.shape[0] != self.stored[0]
            return self.array.view() if whole else self.array.view(rows)
        return self.array.view()[self.layout.rows[rows]]

    def values(self, numbers: Array, rows: slice) -> Array:
        """Values (..., in_dims) of these rows with their columns in order, in their own shape."""
        if self.layout.columns is not None:
            numbers = numbers.reshape(-1, len(self.layout.columns))[:, self.layout.columns]
        return numbers.reshape(rows.stop - rows.start, *self.shape[1:])

    def groups(self, size: int) -> Order | slice:
        order = self.layout.columns
        if order is None:
            return slice(None)
        whole = order.reshape(-1, size) if not len(order) % size else order[:, None] + 1
        if (whole - whole[:, :1] != np.arange(whole.shape[1])).any() or (whole[:, 0] % size).any():
            raise UnsupportedModelError(
                f"Tensor {self.array.name!r} of {self.array.path.name} is {self.block.name}, and "
                f"its columns are in an order that divides its blocks of {size}: use a file where "
                "it is not quantised."
            )
        return np.asarray(whole[:, 0] // size)

    def blocks(self, rows: slice) -> Array:
        """(num_blocks, num_bytes) uint8."""
        return self.rows(rows).reshape(-1, self.block.num_bytes)

    def info(self, lossless: MLXFormat | None = None) -> SourceTensor:
        size = self.array.num_bytes
        return SourceTensor(self.name, self.shape, "float32", self.block.name, size, lossless)


_TABLE = ".tid2eid"  # of the experts of each token


def reader_of(place: GGUFTensor) -> TensorReader:
    kind = place.block.name
    if kind in FLOATS:
        return _floats(place)
    if kind == "I32" and place.name.endswith(_TABLE):
        return _whole_numbers(place)
    if place.layout.change is not None:
        raise place.array.fail(f"is {kind}; expected {' or '.join(FLOATS)}")
    place.groups(32)
    if kind in AFFINE:
        return _affine(place, *AFFINE[kind])
    if kind == "MXFP4":
        return _mxfp4(place)
    decode = values_of(kind, f"Tensor {place.array.name!r} of {place.array.path.name}")

    def values(rows: slice) -> mx.array:
        """float32 values: no MLX format has groups of 16 integers, or such levels."""
        numbers = place.values(decode(place.rows(rows)), rows)
        if place.scale is not None:
            one = len(place.scale) == 1
            scale = place.scale if one else place.scale[rows].reshape(-1, 1, 1)
            numbers = numbers * scale
        return mx.array(numbers)

    return TensorReader(place.info(), (place.array,), values)


def constant(name: str, values: Array) -> TensorReader:
    kind = "I64" if values.dtype.kind == "i" else "F32"
    info = SourceTensor(name, values.shape, FLOATS.get(kind, "int64"), kind.lower(), values.nbytes)
    return TensorReader(info, (), lambda rows: mx.array(values[rows] if values.shape else values))


def _floats(place: GGUFTensor) -> TensorReader:
    kind, change = place.block.name, place.layout.change

    def values(rows: slice) -> mx.array:
        numbers = place.values(place.rows(rows), rows)
        return (
            to_mlx(numbers, kind) if change is None else mx.array(change(to_float32(numbers, kind)))
        )

    dtype = FLOATS[kind] if change is None else "float32"
    info = SourceTensor(place.name, place.shape, dtype, kind.lower(), place.array.num_bytes)
    return TensorReader(info, (place.array,), values)


def _whole_numbers(place: GGUFTensor) -> TensorReader:
    def values(rows: slice) -> mx.array:
        numbers = np.ascontiguousarray(place.rows(rows)).view("<i4")
        return mx.array(place.values(numbers, rows).astype(np.int64))

    info = SourceTensor(place.name, place.shape, "int64", "i32", place.array.num_bytes)
    return TensorReader(info, (place.array,), values)


def _affine(place: GGUFTensor, bits: int, decode: Callable[[Array], Decoded]) -> TensorReader:
    def codes(rows: slice) -> Triple:
        """Blocks taken apart, in MLX's order."""
        numbers, scales, biases = decode(place.blocks(rows))
        *middle, in_dims = place.shape[1:]
        groups = (rows.stop - rows.start, *middle, in_dims // 32)
        order = place.groups(32)
        numbers = numbers.reshape(*groups, 32)[..., order, :].reshape(*groups[:-1], in_dims)
        return numbers, scales.reshape(groups)[..., order], biases.reshape(groups)[..., order]

    def words(rows: slice) -> Triple:
        unpacked, scales, biases = codes(rows)
        packed = pack(unpacked.reshape(-1, place.shape[-1]), bits)
        return packed.reshape(*unpacked.shape[:-1], -1), scales, biases

    info = place.info(affine_format(bits, 32))
    return AffineMatrix(info, (place.array,), 32, words, codes).reader()


def _mxfp4(place: GGUFTensor) -> TensorReader:
    """An exponent and 16 bytes: the low halves are the first 16 values, the high ones the rest."""

    def octets(rows: slice) -> Octets:
        """In MLX's order, in which neighbours share a byte, and exponents."""
        blocks = place.blocks(rows)
        codes = nibbles(blocks[:, 1:], 16)
        packed = codes[:, ::2] | (codes[:, 1::2] << 4)
        *middle, in_dims = place.shape[1:]
        lead = (rows.stop - rows.start, *middle)
        order = place.groups(32)
        exponents = np.ascontiguousarray(blocks[:, 0]).reshape(*lead, in_dims // 32)[..., order]
        packed = packed.reshape(*lead, in_dims // 32, 16)[..., order, :]
        return packed.reshape(*lead, in_dims // 2), exponents

    return float_reader(place.info(MXFP4), (place.array,), MXFP4, octets)
