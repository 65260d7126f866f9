"""Formats of stored key and value vectors, and the arrays of a layer as kernels take them.

A vector is encoded by itself, the moment it is written: what it becomes never depends on
scheduling. Leading axes are free everywhere; the last one is the vector (`dim` numbers) or a part
of what is stored of it. Knows no step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import mlx.core as mx

MAX_FLOAT16 = 65_504.0  # scales and biases of larger numbers would be infinite
MAX_GROUP = 64
PIECE = 2048  # tokens that are decoded together

Runs = Sequence[tuple[int, int]]  # [from, to) ranges of page slots


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A way to store vectors: in the activation dtype as they are, or as a subclass encodes."""

    bits: int = 0  # of a number, as kernels are compiled for; 0: numbers stay as they are
    # keys are multiplied by a Hadamard matrix before they are stored. Queries are multiplied with
    # the same matrix: scores stay the same, and outliers of single channels are spread over all.
    # Values follow `rotates_values`.
    rotates: bool = False

    names: ClassVar[tuple[str, ...]] = ("codes",)
    """A name for each part of a vector, which arrays of kernels end in."""
    in_kernels: ClassVar[bool] = True
    """Whether kernels read and write it, by `bits` and `writer`; else plain MLX does."""

    def rotates_values(self, dim: int) -> bool:
        """Whether values of `dim` numbers are multiplied too: few bits lose much to outliers.

        What attention gives is multiplied again, so the matrix must be its own inverse.
        """
        return self.rotates and self.bits <= 4 and dim & (dim - 1) == 0

    def parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        """(width, dtype) of each part of a vector of `dim` numbers of `dtype`."""
        return [(dim, dtype)]

    def tail_parts(self, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
        """The same of a vector in a tail, where a token is stored before its page is sealed."""
        return self.parts(dim, dtype)

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

    rotates: bool = True  # an outlier takes the precision of its whole group
    names: ClassVar[tuple[str, ...]] = ("codes", "groups")

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
        return f"Affine<{dim}, {first}, {count}, {group_size(dim)}, {self.bits}>"


def group_size(dim: int) -> int:
    """Numbers of a vector that share a scale: as many as divide it, up to 64 and in steps of 8."""
    return max(g for g in range(8, MAX_GROUP + 1, 8) if dim % g == 0)


PLAIN = KVFormat()
FORMATS: dict[int | None, KVFormat] = {None: PLAIN, 0: PLAIN, 8: Affine(8), 4: Affine(4)}
"""By bits of a number, as users ask for them; None and 0: numbers stay as they are."""


@dataclass(slots=True)
class Plane:
    """Stored vectors of one kind, such as the keys of a layer: an array for each part of a vector.

    W = width of a part, P = page_size.
    """

    fmt: KVFormat  # of the vectors
    pages: list[mx.array]  # (heads, tokens, W) each
    # a tail a slot, (tail heads, 2 * P, W), of whatever shape as a whole; maybe the same for keys
    # and values
    tails: list[mx.array]
    vector_dim: int  # numbers of a stored vector
    tail_heads: int  # heads of a tail
    tail_head: int = 0  # the first own one; in shared tails keys come before values
    # the first number that is read of a vector; not 0 of keys that share it with values
    first: int = 0
    dim: int | None = None  # numbers that are read from there on; None: the whole vector
    dtype: mx.Dtype = mx.float32  # of decoded vectors
    as_stored: bool = field(init=False)  # decoding is free: what is stored is what is read

    def __post_init__(self) -> None:
        self.as_stored = self.dim is None and not self.fmt.bits

    def cut(self, first: int, dim: int) -> "Plane":
        """The same arrays; `dim` numbers of each vector are read, from `first` on."""
        return replace(self, first=first, dim=dim)

    @property
    def read_dim(self) -> int:
        return self.vector_dim if self.dim is None else self.dim

    @property
    def own(self) -> slice:
        return slice(self.tail_head, self.tail_head + len(self.pages[0]))

    def decode(self, parts: Sequence[mx.array], dtype: mx.Dtype | None = None) -> mx.array:
        """Parts (..., W) -> the numbers that are read of each vector, (..., dim)."""
        vectors = self.fmt.decode(parts, dtype or self.dtype)
        if self.dim is None:
            return vectors
        return vectors[..., self.first : self.first + self.dim]

    def own_tails(self, page_size: int) -> list[mx.array]:
        """Views (num_slots, heads, 2 * P, W) of each part; not to be kept."""
        return [self._by_slot(part, page_size)[:, self.own] for part in self.tails]

    def _by_slot(self, tails: mx.array, page_size: int) -> mx.array:
        """(num_slots, tail heads, 2 * P, W)."""
        return tails.reshape(-1, self.tail_heads, 2 * page_size, tails.shape[-1])

    def write_pages(self, runs: Runs, row: int, parts: list[mx.array]) -> None:
        """Store rows `row`, `row + 1`, ... of encoded parts (T, H, W) in the slots of `runs`."""
        for start, stop in runs:
            end = row + stop - start
            for pages, part in zip(self.pages, parts, strict=True):
                pages[:, start:stop] = part[row:end].swapaxes(0, 1)  # (H, N, W)
            row = end

    def copy_out(self, start: int, stop: int) -> list[mx.array]:
        """The stored parts (H, N, W) of one run of pages, as copies of their own."""
        return [mx.contiguous(pages[:, start:stop]) for pages in self.pages]

    def copy_in(
        self, parts: list[mx.array], start: int, slot: int, offset: int, page_size: int
    ) -> None:
        """Store parts (H, N, W) in the pages from page slot `start` on, and in a tail."""
        for i, (pages, part) in enumerate(zip(self.pages, parts, strict=True)):
            count = part.shape[1]
            pages[:, start : start + count] = part
            tails = self._by_slot(self.tails[i], page_size)
            assert slot < len(tails), "MLX would write nowhere, and say nothing"
            tails[slot, self.own, offset : offset + count] = part
            self.tails[i] = tails.flatten(0, 2)

    def read_runs(self, runs: Runs, after: mx.array | None = None) -> mx.array:
        """(H, N, D) of several runs, one after the other, decoded not before `after` is there."""
        if len(runs) == 1:
            start, stop = runs[0]
            return self._decoded([pages[:, start:stop] for pages in self.pages], after)
        sources = self.pages if after is None else mx.depends(self.pages, [after])
        joined = [
            mx.concatenate([pages[:, start:stop] for start, stop in runs], axis=1)
            for pages in sources
        ]
        return self._decoded(joined, after)

    def _decoded(self, parts: list[mx.array], after: mx.array | None = None) -> mx.array:
        """(H, N, D), a piece after the other: decoding takes several times what it gives."""
        count = parts[0].shape[1]
        if self.as_stored:
            return parts[0]
        if not self.fmt.bits or (count <= PIECE and after is None):
            return self.decode(parts)
        pieces = []
        for start in range(0, count, PIECE):
            piece = [part[:, start : start + PIECE] for part in parts]
            after = self.decode(piece if after is None else mx.depends(piece, [after]))
            pieces.append(after)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)

    def grow_pages(self, extra_tokens: int) -> None:
        """Make room, one array at a time so that only one is ever there twice."""
        for i, pages in enumerate(self.pages):
            self.pages[i] = extended(pages, axis=1, extra=extra_tokens)
            del pages
            mx.eval(self.pages[i])


def extended(array: mx.array, *, axis: int, extra: int) -> mx.array:
    """The array with `extra` zeros at the end of an axis.

    Padding writes the new array alone, where a concatenation would make the zeros first.
    """
    return mx.pad(array, [(0, extra if i == axis else 0) for i in range(array.ndim)])


def part_names(kind: str, fmt: KVFormat) -> list[str]:
    return [f"{kind}_{name}" for name in fmt.names]


def plane_text(tails: str, pages: str, fmt: KVFormat) -> str:
    """The arguments of `plane_of` in a kernel's body. Plain vectors have no groups to read."""
    pairs = list(zip(part_names(tails, fmt), part_names(pages, fmt), strict=True))
    return ", ".join([name for pair in (*pairs, pairs[-1])[:2] for name in pair])
