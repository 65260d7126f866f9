"""Formats of stored key and value vectors, and the arrays of a layer as kernels take them.

A vector is encoded by itself, the moment it is written: what it becomes never depends on
scheduling. Leading axes are free everywhere; the last one is the vector (`dim` numbers) or a part
of what is stored of it. Knows no step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

MAX_FLOAT16 = 65_504.0  # scales and biases of larger numbers would be infinite
MAX_GROUP = 64


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A way to store vectors: as they are, in the activation dtype, or as a subclass encodes them.

    Attributes:
        bits: of a number, as kernels are compiled for; 0: numbers stay as they are.
    """

    bits: int = 0

    names: ClassVar[tuple[str, ...]] = ("codes",)
    """A name for each part of a vector, which arrays of kernels end in."""

    @property
    def rotates(self) -> bool:
        """Whether keys are multiplied by a Hadamard matrix before they are stored.

        Queries are multiplied with the same matrix: scores stay the same, and outliers of single
        channels are spread over all.
        """
        return False

    def parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        """(width, dtype) of each part of a vector of `dim` numbers of `dtype`."""
        return [(dim, dtype)]

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """(..., dim) -> the parts (..., width)."""
        return [vectors]

    def decode(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """The parts (..., width) -> (..., dim) in `dtype`."""
        return parts[0] if parts[0].dtype == dtype else parts[0].astype(dtype)

    def writer(self, dim: int, first: int, count: int) -> str:
        """The type in kv_write.metal that stores `count` numbers from `first` on of `dim`."""
        return f"Plain<{dim}, {first}, {count}, T>"


@dataclass(frozen=True, slots=True)
class Affine(KVFormat):
    """Codes of 8, 4 or fewer bits; a group of numbers shares a float16 scale and a float16 bias.

    Scale and bias of a group lie side by side: kernels read both at once.

    x is stored as round((x - bias) / scale). Codes of fewer than 8 bits share a byte, the first one
    low. Groups are as large as divide the vector, up to 64 and in steps of 8, so that every head
    dim fits.
    """

    names: ClassVar[tuple[str, ...]] = ("codes", "groups")

    @property
    def rotates(self) -> bool:
        """As of `KVFormat`: with so few codes an outlier takes the precision of its whole group."""
        return self.bits <= 4

    def parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        """Codes; scales and biases."""
        return [(dim * self.bits // 8, mx.uint8), (2 * (dim // group_size(dim)), mx.float16)]

    def encode(self, vectors: mx.array) -> list[mx.array]:
        """(..., dim) -> codes (..., dim * bits / 8), scales and biases (..., 2 * dim / group)."""
        levels = float(2**self.bits - 1)
        group = group_size(vectors.shape[-1])
        grouped = mx.unflatten(vectors.astype(mx.float32), -1, (-1, group))
        grouped = mx.clip(grouped, -MAX_FLOAT16, MAX_FLOAT16)
        low = grouped.min(axis=-1, keepdims=True)
        high = grouped.max(axis=-1, keepdims=True)
        scales = ((high - low) / levels).astype(mx.float16)
        biases = low.astype(mx.float16)
        step = mx.maximum(scales.astype(mx.float32), 1e-8)  # a constant group: all codes 0
        codes = mx.clip(mx.round((grouped - biases) / step), 0, levels).astype(mx.uint8)
        codes = codes.flatten(-2)
        packed, a_byte = codes, 8 // self.bits
        if a_byte > 1:
            packed = codes[..., ::a_byte]
            for i in range(1, a_byte):
                packed = packed | (codes[..., i::a_byte] << (i * self.bits))
        return [packed, mx.concatenate([scales, biases], axis=-1).flatten(-2)]

    def decode(self, parts: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """Codes, scales and biases -> (..., dim)."""
        codes, of_groups = parts
        if self.bits < 8:
            shifts, mask = range(self.bits, 8, self.bits), 2**self.bits - 1
            parts = [codes & mask, *[(codes >> shift) & mask for shift in shifts]]
            codes = mx.stack(parts, axis=-1).flatten(-2)
        scales, biases = mx.split(mx.unflatten(of_groups, -1, (-1, 2)), 2, axis=-1)
        grouped = mx.unflatten(codes, -1, (scales.shape[-2], -1)).astype(mx.float32)
        return (grouped * scales + biases).flatten(-2).astype(dtype)

    def writer(self, dim: int, first: int, count: int) -> str:
        """As of `KVFormat`."""
        return f"Affine<{dim}, {first}, {count}, {group_size(dim)}, {self.bits}>"


def group_size(dim: int) -> int:
    """Numbers of a vector that share a scale: as many as divide it, up to 64 and in steps of 8."""
    return max(g for g in range(8, MAX_GROUP + 1, 8) if dim % g == 0)


PLAIN = KVFormat()
FORMATS: dict[int | None, KVFormat] = {None: PLAIN, 0: PLAIN, 8: Affine(8), 4: Affine(4)}
"""By bits of a number, as users ask for them; None and 0: numbers stay as they are."""


@dataclass(slots=True)
class Vectors:
    """Stored keys or values of a layer: one array for each part of a vector.

    Attributes:
        fmt: of the vectors.
        pages: (heads, tokens, width) each.
        tails: a tail a slot, (tail heads, 2 * page_size, width), of whatever shape as a whole;
            maybe the same for keys and values.
        vector_dim: numbers of a stored vector, of which keys or values may be a part.
        tail_heads: heads of a tail.
        tail_head: the first own one; in shared tails keys come before values.
        first: the first of the numbers in a stored vector; not 0 of keys that share it with values.
    """

    fmt: KVFormat
    pages: list[mx.array]
    tails: list[mx.array]
    vector_dim: int
    tail_heads: int
    tail_head: int = 0
    first: int = 0


def part_names(kind: str, fmt: KVFormat) -> list[str]:
    """Names of the arrays of all parts in a kernel."""
    return [f"{kind}_{name}" for name in fmt.names]


def plane_text(tails: str, pages: str, fmt: KVFormat) -> str:
    """What a kernel's body hands to `plane_of`; plain vectors have no groups, none are read."""
    pairs = list(zip(part_names(tails, fmt), part_names(pages, fmt), strict=True))
    return ", ".join([name for pair in (*pairs, pairs[-1])[:2] for name in pair])


def numbers_of(stored: Vectors, parts: Sequence[mx.array], dim: int) -> mx.array:
    """(..., dim) float32 of parts (..., width) of stored vectors: the keys or the values alone."""
    vectors = stored.fmt.decode(parts, mx.float32)
    return vectors[..., stored.first : stored.first + dim]
