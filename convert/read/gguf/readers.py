"""Readers of GGUF tensors: blocks to values or codes, rows put in order.

llama.cpp keeps the rows of Q and K of the llama architecture in the order of its own rotary
embedding, where two numbers that turn together are neighbours; transformers has them half a head
apart.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ....errors import UnsupportedModelError
from ...arrays import Words, pack
from ..affine import AffineReader, affine_format
from ..base import Reader, not_packed
from ..schemes.fp4 import MXFP4, fp4_values
from ..source import Packed, TensorInfo
from ..stored import FLOATS, Array, StoredArray, to_float32, to_mlx
from .blocks import AFFINE, VALUES, AffineBlocks, nibbles
from .header import BlockType


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file, and how its values become those of transformers."""

    name: str
    array: StoredArray  # floats, or (..., bytes of a row) U8
    shape: tuple[int, ...]
    block: BlockType
    heads: int = 0  # of Q or K whose rows are in llama.cpp's order; 0: in order
    offset: float = 0.0  # to be added to the values

    def rows(self, rows: slice) -> Array:
        """Stored rows in the order of transformers."""
        if not self.heads:
            return self.array.view(rows)
        half = self.shape[0] // self.heads // 2
        ours = np.arange(rows.start, rows.stop)
        head, within = np.divmod(ours, 2 * half)
        part, pair = np.divmod(within, half)
        return self.array.view()[head * 2 * half + pair * 2 + part]

    def blocks(self, rows: slice) -> Array:
        """(num_blocks, num_bytes) uint8."""
        return self.rows(rows).reshape(-1, self.block.num_bytes)

    def info(self, **more: object) -> TensorInfo:
        """What is the same for all kinds."""
        size = self.array.num_bytes
        return TensorInfo(self.name, self.shape, "float32", self.block.name, size, **more)  # type: ignore[arg-type]


def reader_of(place: GGUFTensor) -> Reader:
    """The reader for the type of a tensor.

    Raises:
        CheckpointError: rows that cannot be put in order.
        UnsupportedModelError: a type that is not read.
    """
    if place.heads and place.shape[0] % (2 * place.heads):
        raise place.array.fail(f"has {place.shape[0]} rows, which {place.heads} heads do not share")
    kind = place.block.name
    if kind in FLOATS:
        return _Floats(place)
    if place.offset:
        raise place.array.fail(f"is {kind}; expected {' or '.join(FLOATS)}")
    if kind in AFFINE:
        return _Affine(place, AFFINE[kind])
    if kind in VALUES:
        return _Values(place)
    if kind == "MXFP4":
        return _MXFP4(place)
    raise UnsupportedModelError(
        f"Tensor {place.array.name!r} of {place.array.file} is {kind}, which is not read; read are "
        f"{', '.join([*FLOATS, *AFFINE, *VALUES])} and MXFP4. Use another file of this model."
    )


class _Floats:
    def __init__(self, place: GGUFTensor) -> None:
        self._place = place
        self.parts = (place.array,)
        self.info = TensorInfo(
            name=place.name,
            shape=place.shape,
            dtype="float32" if place.offset else FLOATS[place.block.name],
            stored=place.block.name.lower(),
            stored_bytes=place.array.num_bytes,
        )

    def read(self, rows: slice) -> mx.array:
        """As stored, or with the offset added in float32."""
        place = self._place
        values = place.rows(rows)
        if place.offset:
            return mx.array(to_float32(values, place.block.name) + np.float32(place.offset))
        return to_mlx(values, place.block.name)

    def packed(self) -> Packed:
        """There are no codes."""
        raise not_packed(self.info)


class _Affine(AffineReader):
    def __init__(self, place: GGUFTensor, blocks: AffineBlocks) -> None:
        self._place, self._blocks = place, blocks
        info = place.info(lossless=affine_format(blocks.bits, 32), scales_exact=blocks.half_scales)
        super().__init__(
            info,
            (place.array,),
            bits=blocks.bits,
            group_size=32,
            scale_dtype="float16" if blocks.half_scales else "float32",
        )

    def triple(self, rows: slice) -> tuple[Words, Array, Array]:
        """Blocks taken apart, and codes packed in MLX's order."""
        codes, scales, biases = self._blocks.decode(self._place.blocks(rows))
        *middle, in_dims = self.info.shape[1:]
        lead = (rows.stop - rows.start, *middle)
        groups = (*lead, in_dims // 32)
        words = pack(codes.reshape(-1, in_dims), self.bits).reshape(*lead, -1)
        return words, scales.reshape(groups), biases.reshape(groups)


class _Values:
    def __init__(self, place: GGUFTensor) -> None:
        self._place = place
        self.parts = (place.array,)
        self.info = place.info()

    def read(self, rows: slice) -> mx.array:
        """float32 values."""
        values = VALUES[self._place.block.name](self._place.blocks(rows))
        return mx.array(values.reshape(rows.stop - rows.start, *self.info.shape[1:]))

    def packed(self) -> Packed:
        """No MLX format has groups of 16 integers, or such levels."""
        raise not_packed(self.info)


class _MXFP4:
    """An exponent and 16 bytes: the low halves are the first 16 values, the high ones the rest."""

    def __init__(self, place: GGUFTensor) -> None:
        self._place = place
        self.parts = (place.array,)
        self.info = place.info(lossless=MXFP4)

    def read(self, rows: slice) -> mx.array:
        """Code times power of two."""
        octets, exponents = self._apart(rows)
        return mx.array(fp4_values(octets, to_float32(exponents, "F8_E8M0")))

    def packed(self) -> Packed:
        """Codes in MLX's order: neighbours share a byte."""
        octets, exponents = self._apart(slice(0, self.info.shape[0]))
        return Packed(mx.array(octets.view(np.uint32)), mx.array(exponents), None)

    def _apart(self, rows: slice) -> tuple[Array, Array]:
        blocks = self._place.blocks(rows)
        codes = nibbles(blocks[:, 1:], 16)
        octets = codes[:, ::2] | (codes[:, 1::2] << 4)
        *middle, in_dims = self.info.shape[1:]
        lead = (rows.stop - rows.start, *middle)
        exponents = np.ascontiguousarray(blocks[:, 0]).reshape(*lead, in_dims // 32)
        return octets.reshape(*lead, in_dims // 2), exponents
