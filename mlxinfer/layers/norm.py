"""Normalisation over the last axis: RMS norm (arXiv 1910.07467) and layer norm (1607.06450)."""

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


class LayerNorm:
    """MLX's fused layer norm, with or without a bias."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, weight: mx.array, eps: float, bias: mx.array | None = None) -> None:
        self.weight = weight  # (dims,)
        self.bias = bias  # (dims,)
        self.eps = eps  # added to the variance

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims), of any dtype, to the same shape and dtype."""
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


class WideQKNorm:
    """A norm over all heads of Q at once and one over all heads of K, as OLMo 2 has them."""

    __slots__ = ("k_norm", "num_heads", "q_norm")

    def __init__(self, q_norm: Norm, k_norm: Norm, num_heads: int) -> None:
        self.q_norm = q_norm  # over num_heads * head_dim
        self.k_norm = k_norm  # over num_kv_heads * head_dim
        self.num_heads = num_heads

    def __call__(self, qk: mx.array) -> mx.array:
        """qk (T, num_heads + num_kv_heads, head_dim) to the same shape and dtype."""
        queries, keys = mx.split(qk.flatten(1), [self.num_heads * qk.shape[-1]], axis=-1)
        normed = mx.concatenate([self.q_norm(queries), self.k_norm(keys)], axis=-1)
        return normed.reshape(qk.shape)
