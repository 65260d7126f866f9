"""RMS normalisation. Knows weights and an epsilon; not where in a model it stands."""

from collections.abc import Callable

import mlx.core as mx

Norm = Callable[[mx.array], mx.array]


class RMSNorm:
    """y = x / rms(x) * weight over the last axis (arXiv 1910.07467).

    MLX's fused norm is one kernel on a GPU and eight operations on the CPU; there, `LeanRMSNorm`
    does it in six.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, weight: mx.array | None, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims), of any dtype, to the same shape and dtype."""
        return mx.fast.rms_norm(x, self.weight, self.eps)


class LeanRMSNorm:
    """`RMSNorm` with the mean's division folded into epsilon and weight. For float32 only."""

    __slots__ = ("scaled_eps", "scaled_weight")

    def __init__(self, weight: mx.array | None, eps: float, dims: int) -> None:
        root = mx.array(dims**0.5, mx.float32)
        self.scaled_eps = mx.array(dims * eps, mx.float32)
        self.scaled_weight = root if weight is None else weight * root

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims) float32 to the same shape."""
        squares = mx.sum(mx.square(x), axis=-1, keepdims=True)
        return x * mx.rsqrt(squares + self.scaled_eps) * self.scaled_weight


def rms_norm(weight: mx.array, eps: float) -> Norm:
    """The norm that is cheapest on this machine.

    Args:
        weight: (..., dims); leading axes, if any, broadcast against the input's.
        eps: added to the mean square.
    """
    dims = weight.shape[-1]
    if not mx.metal.is_available() and weight.dtype == mx.float32:
        return LeanRMSNorm(weight, eps, dims)
    if weight.ndim == 1:
        return RMSNorm(weight, eps)
    return _PerHead(weight, eps)


class _PerHead:
    """A norm whose weight differs between heads: the fused norm takes one vector only."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, self.eps) * self.weight
