"""RMS normalisation. Knows weights and an epsilon; not where in a model it stands."""

from collections.abc import Callable

import mlx.core as mx

Norm = Callable[[mx.array], mx.array]


def rms_norm(weight: mx.array, eps: float) -> Norm:
    """y = x / rms(x) * weight over the last axis (arXiv 1910.07467), as is cheapest here.

    Args:
        weight: (..., dims); leading axes, if any, broadcast against the input's.
        eps: added to the mean square.
    """
    if not mx.metal.is_available() and weight.dtype == mx.float32:
        return LeanRMSNorm(weight, eps)
    return RMSNorm(weight, eps) if weight.ndim == 1 else ScaledRMSNorm(weight, eps)


class RMSNorm:
    """MLX's fused norm: one kernel on a GPU."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight  # (dims,)
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims), of any dtype, to the same shape and dtype."""
        return mx.fast.rms_norm(x, self.weight, self.eps)


class ScaledRMSNorm:
    """The fused norm for a weight that differs between heads, of which it takes one vector only."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight  # (heads, dims)
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, heads, dims) to the same shape and dtype."""
        return mx.fast.rms_norm(x, None, self.eps) * self.weight


class LeanRMSNorm:
    """The norm in five operations, for the CPU, where the fused one is eight. float32 only.

    The sum of squares is a product with ones, twice as fast as a reduction there, and the mean's
    division is folded into epsilon and weight.
    """

    __slots__ = ("ones", "scaled_eps", "scaled_weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        *heads, dims = weight.shape
        self.ones = mx.ones((dims, 1), mx.float32)
        # Shaped as for one token, the case where a broadcast less in the graph counts.
        self.scaled_eps = mx.full((1, *heads, 1), dims * eps, mx.float32)
        self.scaled_weight = (weight * dims**0.5)[None]

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims) float32 to the same shape."""
        squares = mx.addmm(self.scaled_eps, mx.square(x), self.ones)  # (..., 1)
        return x * mx.rsqrt(squares) * self.scaled_weight
