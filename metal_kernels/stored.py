"""Keys or values of a layer as kernels take them: pages and tails of each part. Knows no step."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

PARTS = ("codes", "scales", "biases")


class Stored(Protocol):
    """Keys or values of a layer: one array for each part of a vector.

    Plain vectors have one part. Quantised ones have three: codes uint8 (two of 4 bits share a byte,
    the even one low), scales and biases float16 of groups of numbers. A group is the largest
    multiple of 8 up to 64 that divides the vector.
    """

    @property
    def pages(self) -> Sequence[mx.array]:
        """(heads, tokens, width) each."""
        ...

    @property
    def tails(self) -> Sequence[mx.array]:
        """(slots, heads, 2 * page_size, width) each."""
        ...


def stored_bits(stored: Stored, dim: int) -> int:
    """Bits of a number of vectors of `dim`; 0: plain."""
    return 0 if len(stored.pages) == 1 else stored.pages[0].shape[-1] * 8 // dim


def plane_names(kind: str) -> list[str]:
    """Names of a plane's arrays in a kernel, in the order of `plane_arrays`."""
    return [f"{kind}_{where}{part}" for part in PARTS for where in ("tail_", "")]


def plane_arrays(stored: Stored) -> list[mx.array]:
    """Tail and pages of each part; plain vectors stand for scales and biases too, unread."""
    pairs = list(zip(stored.tails, stored.pages, strict=True))
    return [array for pair in (pairs if len(pairs) > 1 else pairs * 3) for array in pair]


def decoded(parts: Sequence[mx.array], dim: int) -> mx.array:
    """(..., dim) float32 of the parts (..., width)."""
    if len(parts) == 1:
        return parts[0].astype(mx.float32)
    codes, scales, biases = parts
    if codes.shape[-1] < dim:
        codes = mx.stack([codes & 15, codes >> 4], axis=-1).flatten(-2)
    grouped = mx.unflatten(codes, -1, (scales.shape[-1], -1)).astype(mx.float32)
    return (grouped * scales[..., None] + biases[..., None]).flatten(-2)
