"""Makes layers from arrays. Chosen once, when a model is loaded; see `cpu.layer_factory`."""

import mlx.core as mx

from .causal_conv import CausalConv
from .linear import (
    DenseEmbedding,
    Embedding,
    Linear,
    Projection,
    QuantizedEmbedding,
    QuantizedLinear,
)
from .moe import ExpertLinear, ExpertProjection, QuantizedExpertLinear, WideExperts
from .norm import HeadRMSNorm, Norm, RMSNorm
from .rope import FusedRope, LongRope, RopeSpec
from .step import Rope


class LayerFactory:
    """Layers as a GPU runs them; they run on MLX's CPU backend too, only slower."""

    def linear(self, weight: mx.array, bias: mx.array | None = None) -> Projection:
        """A dense matrix (out_dims, in_dims) and a bias (out_dims,)."""
        return Linear(weight, bias)

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
        """A quantised matrix, its arrays as `QuantizedLinear` has them."""
        return QuantizedLinear(
            weight, scales, biases, bias, group_size=group_size, bits=bits, mode=mode
        )

    def experts(self, weight: mx.array, bias: mx.array | None = None) -> ExpertProjection:
        """Dense matrices (E, out_dims, in_dims) and biases (E, out_dims)."""
        if not mx.metal.is_available() and weight.dtype != mx.float32:
            wide = None if bias is None else bias.astype(mx.float32)
            return WideExperts(self.experts(weight.astype(mx.float32), wide))
        return ExpertLinear(weight, bias)

    def quantized_experts(
        self,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        bias: mx.array | None = None,
        *,
        group_size: int,
        bits: int,
        mode: str,
    ) -> ExpertProjection:
        """Quantised matrices, their arrays as `QuantizedExpertLinear` has them."""
        return QuantizedExpertLinear(
            weight, scales, biases, bias, group_size=group_size, bits=bits, mode=mode
        )

    def embedding(self, weight: mx.array, *, shared: bool) -> Embedding:
        """A dense table (vocab_size, hidden_size); `shared`: it is the output projection too."""
        return DenseEmbedding(weight)

    def quantized_embedding(self, table: QuantizedLinear, dtype: mx.Dtype) -> Embedding:
        """A quantised table whose rows become `dtype`."""
        return QuantizedEmbedding(table, dtype)

    def norm(self, weight: mx.array, eps: float) -> Norm:
        """An RMS norm; weight (dims,), or (heads, dims) where each head has its own.

        Args:
            weight: leading axes broadcast against the input's.
            eps: added to the mean square.
        """
        return RMSNorm(weight, eps) if weight.ndim == 1 else HeadRMSNorm(weight, eps)

    def causal_conv(self, weight: mx.array, bias: mx.array | None = None) -> CausalConv:
        """A convolution of weights (C, K) and a bias (C,)."""
        return CausalConv(weight, bias)

    def rope(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> Rope:
        """A rope; an attention factor on whole heads is left to the scale (`scale_factor`)."""
        rope = self._rope(spec, head_dim, dtype)
        if spec.long is None:
            return rope
        return LongRope(rope, self._rope(spec.long, head_dim, dtype))

    def _rope(self, spec: RopeSpec, head_dim: int, dtype: mx.Dtype) -> Rope:
        """Of one variant."""
        return FusedRope(spec, head_dim, dtype)
