"""RMS normalisation, y = x / rms(x) * weight over the last axis (arXiv 1910.07467)."""

from collections.abc import Callable

import mlx.core as mx

Norm = Callable[[mx.array], mx.array]


class RMSNorm:
    """MLX's fused norm: one kernel on a GPU. Its sums are float32 whatever the input's dtype."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight  # (dims,)
        self.eps = eps  # added to the mean square

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims), of any dtype, to the same shape and dtype."""
        return mx.fast.rms_norm(x, self.weight, self.eps)


class HeadRMSNorm:
    """The fused norm over each head, with weights that differ between heads.

    MLX's norm takes one weight vector, so the product with the weights is an operation of its own.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight  # (heads, dims)
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, heads, dims) to the same shape and dtype."""
        return mx.fast.rms_norm(x, None, self.eps) * self.weight
