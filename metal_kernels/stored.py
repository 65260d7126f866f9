"""Keys or values of a layer as kernels take them: pages and tails of each part. Knows no step."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

PARTS = ("codes", "groups")


class Stored(Protocol):
    """Keys or values of a layer: one array for each part of a vector.

    Plain vectors have one part. Quantised ones have two: codes uint8 (two of 4 bits share a byte,
    the even one low), and of each group of numbers a scale and a bias, float16. A group is the
    largest multiple of 8 up to 64 that divides the vector.
    """

    @property
    def pages(self) -> Sequence[mx.array]:
        """(heads, tokens, width) each."""
        ...

    @property
    def tails(self) -> Sequence[mx.array]:
        """Each a tail a slot, (tail heads, 2 * page_size, width), of whatever shape as a whole.

        Maybe the same for keys and values.
        """
        ...

    @property
    def first(self) -> int:
        """The first of the numbers in a stored vector; not 0 of keys that share it with values."""
        ...

    @property
    def vector_dim(self) -> int:
        """Numbers of a stored vector, where `first` is not 0 or others follow; else 0 or all."""
        ...

    @property
    def tail_heads(self) -> int:
        """How many heads a tail has."""
        ...

    @property
    def tail_head(self) -> int:
        """The first of its heads among the tail heads; in shared tails keys come before values."""
        ...


def stored_bits(stored: Stored, dim: int) -> int:
    """Bits of a number of vectors of `dim`; 0: plain."""
    return 0 if is_plain(stored) else stored.pages[0].shape[-1] * 8 // dim


def share_tails(dims: tuple[int, int], bits: tuple[int | None, int | None]) -> bool:
    """Keys and values, of these sizes and bits, are stored alike, and so side by side in tails."""
    return dims[0] == dims[1] and bits[0] == bits[1]


def is_plain(stored: Stored) -> bool:
    """Vectors are as they are: one part."""
    return len(stored.pages) == 1


def part_names(kind: str, *, plain: bool) -> list[str]:
    """Names of the arrays of all parts in a kernel."""
    return [f"{kind}_{part}" for part in (PARTS[:1] if plain else PARTS)]


def plane_text(tails: str, pages: str, *, plain: bool) -> str:
    """What a kernel's body hands to `plane_of`; plain vectors have no groups, none are read."""
    pairs = zip(part_names(tails, plain=plain), part_names(pages, plain=plain), strict=True)
    return ", ".join([name for pair in pairs for name in pair] * (len(PARTS) if plain else 1))


def numbers_of(stored: Stored, parts: Sequence[mx.array], dim: int) -> mx.array:
    """(..., dim) float32 of parts (..., width) of stored vectors: the keys or the values alone."""
    vectors = decoded(parts, stored.vector_dim or dim)
    return vectors[..., stored.first : stored.first + dim]


def decoded(parts: Sequence[mx.array], dim: int) -> mx.array:
    """(..., dim) float32 of the parts (..., width)."""
    if len(parts) == 1:
        return parts[0].astype(mx.float32)
    codes, of_groups = parts
    if codes.shape[-1] < dim:
        codes = mx.stack([codes & 15, codes >> 4], axis=-1).flatten(-2)
    scales, biases = mx.split(mx.unflatten(of_groups, -1, (-1, 2)), 2, axis=-1)
    grouped = mx.unflatten(codes, -1, (scales.shape[-2], -1)).astype(mx.float32)
    return (grouped * scales + biases).flatten(-2)
