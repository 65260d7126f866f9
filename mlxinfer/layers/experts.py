"""One matrix per expert, stacked: dense, tiled or quantised. Knows no router."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from .linear import TILE, tiled


class ExpertProjection(Protocol):
    """One matrix per expert; each row of x is multiplied with the matrix of its expert."""

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """x (..., 1, in_dims), experts (...) -> (..., 1, out_dims)."""
        ...


def dense_experts(weight: mx.array, bias: mx.array | None = None) -> ExpertProjection:
    """Dense matrices (E, out_dims, in_dims), stored as is quickest to read on this machine."""
    if not mx.metal.is_available() and weight.dtype != mx.float32:
        wide = bias if bias is None else bias.astype(mx.float32)
        return WideExperts(dense_experts(weight.astype(mx.float32), wide))
    tiles = tiled(weight)
    return ExpertLinear(weight, bias) if tiles is None else TiledExpertLinear(tiles, bias)


class ExpertLinear:
    """Dense matrices, stacked."""

    __slots__ = ("bias", "transposed")

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        self.transposed = weight.swapaxes(-1, -2)  # (E, in_dims, out_dims)
        self.bias = bias  # (E, out_dims)

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """x (..., 1, in_dims), experts (...) -> (..., 1, out_dims)."""
        y = mx.gather_mm(x, self.transposed, rhs_indices=experts, sorted_indices=in_order)
        return y if self.bias is None else y + self.bias[experts][..., None, :]


class TiledExpertLinear:
    """Dense matrices in tiles of outputs, stacked: each tile counts as an expert of its own."""

    __slots__ = ("bias", "of_expert", "shape", "tiles")

    def __init__(self, tiles: mx.array, bias: mx.array | None = None) -> None:
        num_experts, num_tiles, *_ = tiles.shape
        self.tiles = tiles.flatten(0, 1)  # (E * num_tiles, in_dims, TILE)
        self.of_expert = mx.arange(num_experts * num_tiles).reshape(num_experts, num_tiles)
        self.bias = bias  # (E, out_dims)
        self.shape = (1, num_tiles * TILE)

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """x (..., 1, in_dims), experts (...) -> (..., 1, out_dims)."""
        y = mx.gather_mm(
            x[..., None, :, :],
            self.tiles,
            rhs_indices=self.of_expert[experts],  # (..., num_tiles)
            sorted_indices=in_order,
        )  # (..., num_tiles, 1, TILE)
        y = y.reshape(*experts.shape, *self.shape)
        return y if self.bias is None else y + self.bias[experts][..., None, :]


class WideExperts:
    """Matrices of 16 bits held in 32: MLX's CPU backend has no such product of narrower ones."""

    __slots__ = ("wide",)

    def __init__(self, wide: ExpertProjection) -> None:
        self.wide = wide

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """x (..., 1, in_dims), experts (...) -> (..., 1, out_dims), in the dtype of x."""
        return self.wide(x.astype(mx.float32), experts, in_order).astype(x.dtype)


class QuantizedExpertLinear:
    """Quantised matrices, stacked."""

    __slots__ = ("bias", "biases", "bits", "group_size", "mode", "scales", "weight")

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        bias: mx.array | None = None,
        *,
        group_size: int,
        bits: int,
        mode: str,
    ) -> None:
        self.weight = weight  # (E, out_dims, in_dims * bits / 32) uint32
        self.scales = scales  # (E, out_dims, in_dims / group_size)
        self.biases = biases  # as scales; affine only
        self.bias = bias  # (E, out_dims)
        self.group_size = group_size
        self.bits = bits
        self.mode = mode

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """x (..., 1, in_dims), experts (...) -> (..., 1, out_dims)."""
        y = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=in_order,
        )
        return y if self.bias is None else y + self.bias[experts][..., None, :]


class JoinedExperts:
    """Expert projections of the same input, side by side: for formats that cannot be fused."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[ExpertProjection]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """x (..., 1, in_dims), experts (...) -> (..., 1, sum of out_dims)."""
        return mx.concatenate([part(x, experts, in_order) for part in self.parts], axis=-1)
