"""Layers in the forms that MLX's CPU backend runs quickest. A Mac's GPU runs none of this.

`layer_factory` chooses them once, when a model is loaded, where there is no Metal. The environment
variable MLXINFER_CPU_LAYERS=0 switches them off: the model is then made of the very layers that a
GPU would run (but for dense experts of 16 bits, which do not run here), and a benchmark on a CPU
measures what carries over. The tokens are the same up to rounding.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .causal_conv import CausalConv
from .factory import LayerFactory
from .linear import DenseEmbedding, Embedding, Linear, Projection, QuantizedLinear
from .mlp import Activation, Gated, gelu_of
from .moe import ExpertLinear, ExpertProjection, Routed
from .norm import Norm, RMSNorm
from .rope import RopeSpec, inverse_frequencies, magnitudes
from .step import Rope, Rows

SWITCH = "MLXINFER_CPU_LAYERS"
TILE = 32  # outputs a tile
MAX_MISSING = 16  # of so many outputs one at most may be missing from the last tile
UNPACKED = 1_000_000  # multiplications of a product that OpenBLAS does without packing it first
BLOCK = 1 << 15  # numbers that numpy works on at a time
UNPACK_FROM = 8  # rows from which a quantised matrix is dequantised as a whole
MAX_UNPACKED = 1 << 26  # numbers that it may have for that, for the time of one product
Numbers = TypeVar("Numbers", mx.array, NDArray[np.float32])


def layer_factory(*, many_rows: bool = False) -> LayerFactory:
    """The forms for this machine; `many_rows`: of models that never see few tokens at once."""
    if mx.metal.is_available():
        return LayerFactory()
    if os.environ.get(SWITCH) == "0":
        return WideExpertsLayerFactory()
    return ManyRowsLayerFactory() if many_rows else CPULayerFactory()


class WideExpertsLayerFactory(LayerFactory):
    """Layers as a GPU runs them, but for dense experts of 16 bits."""

    def experts(self, weight: mx.array, bias: mx.array | None = None) -> ExpertProjection:
        """As of LayerFactory."""
        if weight.dtype == mx.float32:
            return super().experts(weight, bias)
        wide = None if bias is None else bias.astype(mx.float32)
        return WideExperts(self.experts(weight.astype(mx.float32), wide))


class CPULayerFactory(WideExpertsLayerFactory):
    """Tiles for dense float32 matrices, tables for ropes, and products of dequantised matrices."""

    def linear(self, weight: mx.array, bias: mx.array | None = None) -> Projection:
        """As of LayerFactory."""
        out_dims = len(weight)
        missing = -out_dims % TILE
        if missing * MAX_MISSING > out_dims or weight.dtype != mx.float32:
            return Linear(weight, bias)
        tiles = tiled(mx.pad(weight, [(0, missing), (0, 0)]) if missing else weight)
        assert tiles is not None
        return TiledLinear(tiles, bias, missing=missing)

    def quantized_linear(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        bias: mx.array | None = None,
        *,
        group_size: int,
        bits: int,
        mode: str,
    ) -> QuantizedLinear:
        """As of LayerFactory."""
        kind = QuantizedLinear if weight.size * 32 // bits > MAX_UNPACKED else UnpackedLinear
        return kind(weight, scales, biases, bias, group_size=group_size, bits=bits, mode=mode)

    def experts(self, weight: mx.array, bias: mx.array | None = None) -> ExpertProjection:
        """As of LayerFactory."""
        if weight.dtype != mx.float32:
            return super().experts(weight, bias)
        tiles = tiled(weight)
        return ExpertLinear(weight, bias) if tiles is None else TiledExpertLinear(tiles, bias)

    def embedding(self, weight: mx.array, *, shared: bool) -> Embedding:
        """As of LayerFactory."""
        tiles = tiled(weight) if shared else None
        return DenseEmbedding(weight) if tiles is None else TiledEmbedding(tiles)

    def plain(self, name: str) -> Activation:
        """As of LayerFactory."""
        return gelu_of(lean_erf) if name == "gelu" else super().plain(name)

    def gated(self, name: str, dtype: mx.Dtype) -> Gated:
        """As of LayerFactory."""
        if name != "gelu" or dtype != mx.float32:
            return super().gated(name, dtype)
        gelu = gelu_of(lean_erf)
        return Gated(lambda gate, up: gelu(gate) * up)

    def norm(self, weight: mx.array, eps: float) -> Norm:
        """As of LayerFactory."""
        lean = weight.dtype == mx.float32
        return LeanRMSNorm(weight, eps) if lean else super().norm(weight, eps)

    def causal_conv(self, weight: mx.array, bias: mx.array | None = None) -> CausalConv:
        """As of LayerFactory."""
        return ViewConv(weight, bias)

    def _rope(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> Rope:
        """As of LayerFactory."""
        return TableRope(spec, head_dim, dtype)


class ManyRowsLayerFactory(CPULayerFactory):
    """Dense matrices as they are: products of hundreds of rows are what a BLAS is quick at."""

    def linear(self, weight: mx.array, bias: mx.array | None = None) -> Projection:
        """As of LayerFactory."""
        return Linear(weight, bias)

    def plain(self, name: str) -> Activation:
        """As of LayerFactory."""
        return gelu_with_numpy if name == "gelu" else super().plain(name)

    @property
    def attend(self) -> Callable[..., mx.array]:
        """As of LayerFactory."""
        return attend_with_numpy


def attend_with_numpy(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """MLX's attention in numpy. float32; others and causal ones as MLX has them.

    MLX's CPU backend computes exponentials one by one, numpy many at once: the softmax took ten
    times as long (measured: 14 and 1.5 ns a score), half of all the time of texts of 200 tokens.
    numpy's products read heads where they lie in the projection, which MLX copies first.

    Args:
        queries: (n, heads, l, D).
        keys: (n, H, S, D).
        values: (n, H, S, V).
        scale: multiplies the scores.
        mask: (l, S) bool, true where a query sees a key.
        sinks: as of MLX's function.
    """
    if sinks is not None or isinstance(mask, str) or queries.dtype != mx.float32:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    mx.eval(queries, keys, values)
    q, k, v = np.asarray(queries), np.asarray(keys)[:, :, None], np.asarray(values)[:, :, None]
    count, _, length, dim = q.shape
    q = q.reshape(count, k.shape[1], -1, length, dim)  # (n, H, heads / H, l, D)
    mixed = np.empty((count, length, *q.shape[1:3], v.shape[-1]), np.float32)
    with np.errstate(all="ignore"):  # what is infinite is found in the result
        weights = (q * np.float32(scale)) @ k.swapaxes(-1, -2)  # (n, H, heads / H, l, S)
        if mask is not None:
            np.copyto(weights, -np.inf, where=~np.asarray(mask))
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        view = mixed.transpose(0, 2, 3, 1, 4)
        np.matmul(weights, v, out=view)
        view /= weights.sum(axis=-1, keepdims=True)
    return mx.array(mixed).flatten(2, 3).swapaxes(1, 2)


def tiled(weight: mx.array) -> mx.array | None:
    """(..., out_dims, in_dims) as (..., out_dims / TILE, in_dims, TILE); None where it is no gain.

    A BLAS treats the product of a few rows with a large transposed matrix as a large product: it
    packs the matrix first, at a quarter of the memory's speed, or walks down its columns. Small
    contiguous tiles are read once and in order (measured: three to six times faster with OpenBLAS
    for 1 to 8 rows, and more than twice with MLX's own for any number). For float32 alone.
    """
    *stack, out_dims, in_dims = weight.shape
    if weight.dtype != mx.float32 or out_dims % TILE:
        return None
    parts = weight.reshape(*stack, out_dims // TILE, TILE, in_dims)
    return mx.contiguous(parts.swapaxes(-1, -2))


class TiledLinear:
    """A dense matrix in tiles of outputs, each a small product of its own.

    Many rows are multiplied in blocks, small enough to be quick (measured: 20 to 35 % faster from
    64 rows on); where a tile is too large for that, all at once.

    Args:
        tiles: (ceil(out_dims / TILE), in_dims, TILE).
        bias: (out_dims,); None: there is none.
        missing: outputs of the last tile that are none.
    """

    __slots__ = ("bias", "block_rows", "missing", "shape", "tiles")

    def __init__(self, tiles: mx.array, bias: mx.array | None = None, *, missing: int = 0) -> None:
        self.tiles = tiles
        self.bias = bias
        self.missing = missing
        self.shape = (-1, tiles.shape[0] * TILE)
        self.block_rows = min(32, UNPACKED // (TILE * tiles.shape[1]) // 16 * 16) or sys.maxsize

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        rows = x.shape[0]
        missing = -rows % self.block_rows  # from the last block
        if rows >= 2 * self.block_rows and 8 * missing <= rows:
            y = self._in_blocks(x, missing)
        else:
            y = x @ self.tiles  # (out_dims / TILE, T, TILE)
            y = (y if rows == 1 else y.swapaxes(0, 1)).reshape(self.shape)
        if self.missing:
            y = y[:, : -self.missing]
        if self.bias is not None:
            y = y + self.bias
        return y if residual is None else residual + y

    def _in_blocks(self, x: mx.array, missing: int) -> mx.array:
        padded = mx.pad(x, [(0, missing), (0, 0)]) if missing else x
        blocks = padded.reshape(-1, 1, self.block_rows, x.shape[1])
        return (blocks @ self.tiles).swapaxes(1, 2).reshape(self.shape)[: len(x)]


class TiledEmbedding:
    """A dense table in the layout that its use as output projection wants."""

    __slots__ = ("tiles",)

    def __init__(self, tiles: mx.array) -> None:
        self.tiles = tiles  # (vocab_size / TILE, hidden_size, TILE)

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        return self.tiles[ids // TILE, :, ids % TILE]

    def as_linear(self) -> TiledLinear:
        """The same numbers, seen as a matrix."""
        return TiledLinear(self.tiles)


class WideExperts:
    """Matrices of 16 bits held in 32: MLX's CPU backend has no such product of narrower ones."""

    __slots__ = ("wide",)

    def __init__(self, wide: ExpertProjection) -> None:
        self.wide = wide

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims), in the dtype of x."""
        return self.wide(x.astype(mx.float32), routed).astype(x.dtype)


class TiledExpertLinear:
    """Dense matrices in tiles of outputs, stacked: each tile counts as an expert of its own."""

    __slots__ = ("bias", "of_expert", "shape", "tiles")

    def __init__(self, tiles: mx.array, bias: mx.array | None = None) -> None:
        num_experts, num_tiles, *_ = tiles.shape
        self.tiles = tiles.flatten(0, 1)  # (E * num_tiles, in_dims, TILE)
        self.of_expert = mx.arange(num_experts * num_tiles).reshape(num_experts, num_tiles)
        self.bias = bias  # (E, out_dims)
        self.shape = (1, num_tiles * TILE)

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x (..., 1, in_dims), with its experts (...) -> (..., 1, out_dims)."""
        experts = routed.experts
        y = mx.gather_mm(
            x[..., None, :, :],
            self.tiles,
            rhs_indices=self.of_expert[experts],  # (..., num_tiles)
            sorted_indices=routed.in_order,
        )  # (..., num_tiles, 1, TILE)
        y = y.reshape(*experts.shape, *self.shape)
        return y if self.bias is None else y + self.bias[experts][..., None, :]


class UnpackedLinear(QuantizedLinear):
    """A quantised matrix that many rows meet dequantised.

    MLX's CPU backend dequantises once for every row of x, without a BLAS: 64 rows took ten times as
    long as dequantising and a dense product. From UNPACK_FROM rows on the matrix is dequantised as
    a whole, for the time of the product.
    """

    __slots__ = ()

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims) -> (T, out_dims), plus the residual."""
        form = (self.group_size, self.bits, self.mode)
        if x.shape[0] < UNPACK_FROM:
            y = mx.quantized_matmul(x, self.weight, self.scales, self.biases, True, *form)
        else:
            plain = mx.dequantize(self.weight, self.scales, self.biases, *form, dtype=x.dtype)
            tiles = tiled(plain)
            y = x @ plain.T if tiles is None else TiledLinear(tiles)(x)
        if self.bias is not None:
            y = y + self.bias
        return y if residual is None else residual + y


# Odd over even powers of x, for |x| up to ERF_END, behind which float32 has 1.
ERF_ODD = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
ERF_EVEN = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
    -1.42647390514189e-02,
)  # fmt: skip
ERF_END = 4.0


def lean_erf(x: mx.array) -> mx.array:
    """The error function as a quotient of polynomials: MLX's own takes some ten times as long.

    MLX's CPU backend computes erf number by number, and sums and products many at once. Within
    5e-7 of it. Source of the coefficients: Eigen, `generic_fast_erf_float`. float32; others as
    MLX has them.
    """
    if x.dtype != mx.float32:
        return mx.erf(x)
    x = mx.clip(x, -ERF_END, ERF_END)
    squares = mx.square(x)
    odd, even = (_polynomial(squares, factors) for factors in (ERF_ODD, ERF_EVEN))
    return x * odd / even


# Of y = x / 2, lowest power of y² last: tanh(y * polynomial) is erf(x / sqrt(2)).
GELU_CURVE = (
    1.485967e-05, -2.73987738e-04, 2.03472329e-03, -7.07499171e-03, -1.05685589e-03,
    2.90673196e-01, 1.59576857e00,
)  # fmt: skip


def gelu_with_numpy(x: mx.array) -> mx.array:
    """GELU in blocks that stay in a CPU's cache: half the time of `lean_erf` in numpy.

    erf(x / sqrt(2)) is tanh of an odd function of x that is nearly a line: the curve is half the
    logit of the normal distribution, fitted so that GELU is within 2e-7 of max(1, |x|). numpy
    computes tanh many at once. float32; others as MLX has them.
    """
    if x.dtype != mx.float32:
        return gelu_of(mx.erf)(x)
    x = x * 0.5
    mx.eval(x)
    numbers = np.asarray(x).reshape(-1)  # the very numbers: nothing else holds them
    with np.errstate(all="ignore"):  # what is infinite is found in the result
        for start in range(0, len(numbers), BLOCK):
            y = numbers[start : start + BLOCK]
            y += y * np.tanh(y * _polynomial(y * y, GELU_CURVE))
    return x


def _polynomial(x: Numbers, factors: Sequence[float]) -> Numbers:
    """factors[0] * x**n + … + factors[n]."""
    y = x * factors[0]
    for factor in factors[1:-1]:
        y += factor
        y *= x
    y += factors[-1]
    return y


class LeanRMSNorm(RMSNorm):
    """The norm in five operations, where the fused one is eight. float32 only.

    The sum of squares is a product with ones, twice as fast as a reduction, and the mean's
    division is folded into epsilon and weight.
    """

    __slots__ = ("ones", "scaled_eps", "scaled_weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        super().__init__(weight, eps)
        *heads, dims = weight.shape
        self.ones = mx.ones((dims, 1), mx.float32)
        # Shaped as for one token, the case where a broadcast less in the graph counts.
        self.scaled_eps = mx.full((1, *heads, 1), dims * eps, mx.float32)
        self.scaled_weight = (weight * dims**0.5)[None]

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims) float32 to the same shape."""
        squares = mx.addmm(self.scaled_eps, mx.square(x), self.ones)  # (..., 1)
        return x * mx.rsqrt(squares) * self.scaled_weight


class ViewConv(CausalConv):
    """A sum over views: the depthwise convolution of MLX's CPU backend takes ten times as long."""

    __slots__ = ("taps",)

    def __init__(self, weight: mx.array, bias: mx.array | None = None) -> None:
        super().__init__(weight, bias)
        self.taps = mx.contiguous(weight.T)  # (K, C)

    def over(self, seen: mx.array) -> mx.array:
        """(B, K - 1 + L, C) -> (B, L, C); what a token gives does not depend on B and L."""
        count, total, channels = seen.shape
        shape = count, total - self.length + 1, self.length, channels
        views = mx.as_strided(seen, shape, (total * channels, channels, channels, 1))
        return (views * self.taps).sum(axis=2)


class TableRope:
    """x cos + rotate(x) sin, with tables as wide as the head and computed once a step."""

    __slots__ = ("cuts", "dtype", "frequencies", "magnitudes", "signs")

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> None:
        half, rest = spec.dims // 2, head_dim - spec.dims
        turning = inverse_frequencies(spec)
        self.frequencies = mx.array(turning + turning + [0.0] * rest, mx.float32)  # (head_dim,)
        self.signs = mx.array([-1.0] * half + [1.0] * half + [0.0] * rest, mx.float32)
        self.cuts = [half, spec.dims] if rest else [half]
        self.magnitudes = magnitudes(spec, head_dim, mx.float32)
        self.dtype = dtype

    def prepare(
        self, positions: mx.array, variants: Rows | None = None
    ) -> tuple[mx.array, mx.array]:
        """Positions (T,) to cosines and signed sines, each (T, 1, head_dim)."""
        angles = positions[:, None, None] * self.frequencies
        cosines, sines = mx.cos(angles), mx.sin(angles) * self.signs
        if self.magnitudes is not None:
            cosines, sines = cosines * self.magnitudes, sines * self.magnitudes
        return cosines.astype(self.dtype), sines.astype(self.dtype)

    def __call__(self, x: mx.array, prepared: tuple[mx.array, mx.array]) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""
        cosines, sines = prepared
        first, second, *rest = mx.split(x, self.cuts, axis=-1)
        return x * cosines + mx.concatenate([second, first, *rest], axis=-1) * sines
