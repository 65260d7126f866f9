"""Readers of GGUF tensors: blocks to values or codes, in the order of transformers (layout.py)."""

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
from .layout import PLAIN, Order, TensorLayout


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file, and how its values become those of transformers."""

    name: str
    array: StoredArray  # floats, or (..., bytes of a row) U8
    stored: tuple[int, ...]  # shape of the values, as in the file
    block: BlockType
    layout: TensorLayout = PLAIN

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values, as transformers has them."""
        shape = self.layout.shape or self.stored
        return shape if self.layout.rows is None else (len(self.layout.rows), *shape[1:])

    def rows(self, rows: slice) -> Array:
        """Stored rows in the order of transformers."""
        if self.layout.rows is None:
            whole = len(self.stored) != len(self.shape) and self.shape[0] != self.stored[0]
            return self.array.view() if whole else self.array.view(rows)
        return self.array.view()[self.layout.rows[rows]]

    def values(self, found: Array, rows: slice) -> Array:
        """Values (..., in_dims) of these rows with their columns in order, in their own shape."""
        if self.layout.columns is not None:
            found = found.reshape(-1, len(self.layout.columns))[:, self.layout.columns]
        return found.reshape(rows.stop - rows.start, *self.shape[1:])

    def groups(self, size: int) -> Order | slice:
        """The order of groups of `size` columns; all of them as they are: a slice."""
        order = self.layout.columns
        if order is None:
            return slice(None)
        whole = order.reshape(-1, size) if not len(order) % size else order[:, None] + 1
        if (whole - whole[:, :1] != np.arange(whole.shape[1])).any() or (whole[:, 0] % size).any():
            raise UnsupportedModelError(
                f"Tensor {self.array.name!r} of {self.array.file} is {self.block.name}, and its "
                f"columns are in an order that divides its blocks of {size}: use a file where it "
                "is not quantised."
            )
        return np.asarray(whole[:, 0] // size)

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
    kind = place.block.name
    if kind in FLOATS:
        return _Floats(place)
    if place.layout.change is not None:
        raise place.array.fail(f"is {kind}; expected {' or '.join(FLOATS)}")
    place.groups(32)
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
            dtype="float32" if place.layout.change is not None else FLOATS[place.block.name],
            stored=place.block.name.lower(),
            stored_bytes=place.array.num_bytes,
        )

    def read(self, rows: slice) -> mx.array:
        """As stored, or changed in float32."""
        place = self._place
        values, change = place.values(place.rows(rows), rows), place.layout.change
        if change is not None:
            return mx.array(change(to_float32(values, place.block.name)))
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
        order = self._place.groups(32)
        codes = codes.reshape(-1, in_dims // 32, 32)[:, order].reshape(-1, in_dims)
        words = pack(codes, self.bits).reshape(*lead, -1)
        return words, scales.reshape(groups)[..., order], biases.reshape(groups)[..., order]


class _Values:
    def __init__(self, place: GGUFTensor) -> None:
        self._place = place
        self.parts = (place.array,)
        self.info = place.info()

    def read(self, rows: slice) -> mx.array:
        """float32 values."""
        values = VALUES[self._place.block.name](self._place.blocks(rows))
        return mx.array(self._place.values(values, rows))

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
        order = self._place.groups(32)
        exponents = np.ascontiguousarray(blocks[:, 0]).reshape(*lead, in_dims // 32)[..., order]
        octets = octets.reshape(*lead, in_dims // 32, 16)[..., order, :]
        return np.ascontiguousarray(octets.reshape(*lead, in_dims // 2)), exponents
