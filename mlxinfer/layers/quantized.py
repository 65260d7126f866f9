"""Matrix products with weights in MLX's quantised formats. Knows no checkpoint names."""

import sys

import mlx.core as mx

from .linear import dense

UNPACK_FROM = 8  # rows from which the CPU multiplies faster with what it has dequantised first
MAX_UNPACKED = 1 << 26  # numbers that it may hold for that, for the time of one product


class QuantizedLinear:
    """A matrix in one of MLX's quantised formats.

    The product dequantises as it goes. MLX's CPU backend does so once for every row of x, without a
    BLAS (64 rows took ten times as long as dequantising and a dense product); there, from
    UNPACK_FROM rows on, the matrix is dequantised as a whole for the time of the product.
    """

    __slots__ = (
        "bias",
        "biases",
        "bits",
        "group_size",
        "mode",
        "scales",
        "unpack_from",
        "weight",
    )

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
        self.weight = weight  # (out_dims, in_dims * bits / 32) uint32
        self.scales = scales  # (out_dims, in_dims / group_size)
        self.biases = biases  # as scales; affine only
        self.bias = bias  # (out_dims,)
        self.group_size = group_size
        self.bits = bits
        self.mode = mode
        unpacks = not mx.metal.is_available() and weight.size * 32 // bits <= MAX_UNPACKED
        self.unpack_from = UNPACK_FROM if unpacks else sys.maxsize

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, in_dims) -> (T, out_dims)."""
        form = (self.group_size, self.bits, self.mode)
        if x.shape[0] >= self.unpack_from:
            plain = mx.dequantize(self.weight, self.scales, self.biases, *form, dtype=x.dtype)
            y = dense(plain)(x)
        else:
            y = mx.quantized_matmul(x, self.weight, self.scales, self.biases, True, *form)
        return y if self.bias is None else y + self.bias

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual + self(x)."""
        return residual + self(x)
