"""Makes layers from arrays. Chosen once, when a model is loaded; see `cpu.layer_factory`."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .causal_conv import CausalConv
from .linear import (
    DenseEmbedding,
    Embedding,
    Linear,
    Projection,
    QuantizedEmbedding,
    QuantizedLinear,
)
from .mlp import PLAIN, Activation, Gated, gated
from .moe import ExpertLinear, ExpertProjection, QuantizedExpertLinear
from .norm import HeadRMSNorm, Norm, RMSNorm
from .rope import FusedRope, LongRope, RopeSpec
from .step import Rope


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Outputs of a layer, side by side, that a checkpoint has as outputs of one of its matrices."""

    path: str  # of that matrix, as the decoder has it
    num_rows: int  # outputs, here
    total: int  # outputs of that matrix
    rows: NDArray[np.int32] | None = None  # which outputs of that matrix; None: all, in order
    factor: mx.array | None = None  # () or (num_rows,), what the matrix is multiplied with here

    def chosen(self, rows: NDArray[np.int32]) -> "SourceRows":
        """Some of these outputs, in an order."""
        factor = self.factor
        if factor is not None and factor.ndim:
            factor = factor[mx.array(rows)]
        rows = rows if self.rows is None else self.rows[rows]
        return SourceRows(self.path, len(rows), self.total, rows, factor)

    def scaled(self, factor: mx.array) -> "SourceRows":
        """These outputs, multiplied by a factor more."""
        whole = factor if self.factor is None else self.factor * factor
        return SourceRows(self.path, self.num_rows, self.total, self.rows, whole)


@dataclass(frozen=True, slots=True)
class InputSlice:
    """The inputs of a checkpoint's matrix that one rank has, side by side."""

    start: int
    total: int


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A projection of a model, and the checkpoint's matrices that it was made of."""

    projection: Projection | ExpertProjection | None  # None: another rank has its layer
    sources: tuple[SourceRows, ...]  # of its outputs, side by side
    in_dims: int
    num_experts: int | None  # None: it is no projection of experts
    inputs: InputSlice | None = None  # where its outputs are summed over ranks; None: it has all

    @property
    def all_inputs(self) -> int:
        """Inputs of the checkpoint's matrices."""
        return self.in_dims if self.inputs is None else self.inputs.total


class LayerFactory:
    """Layers as a GPU runs them; they run on MLX's CPU backend too, only slower.

    Attributes:
        adapter_targets: projections note here what they were made of; None: they do not.
    """

    adapter_targets: list[AdapterTarget] | None = None

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
        """A quantised table with rows that become `dtype`."""
        return QuantizedEmbedding(table, dtype)

    def plain(self, name: str) -> Activation:
        """The activation of a name in `PLAIN`, of blocks without a gate."""
        return PLAIN[name]

    def gated(self, name: str, dtype: mx.Dtype) -> Gated:
        """The gated activation of a name in `ACTIVATIONS`."""
        return gated(name, dtype)

    def norm(self, weight: mx.array, eps: float) -> Norm:
        """An RMS norm; weight (dims,), or (heads, dims) where each head has its own.

        Args:
            weight: leading axes broadcast against the input's.
            eps: added to the mean square.
        """
        return RMSNorm(weight, eps) if weight.ndim == 1 else HeadRMSNorm(weight, eps)

    @property
    def attend(self) -> Callable[..., mx.array]:
        """Attention where all keys are at hand, with the arguments of MLX's own function."""
        return mx.fast.scaled_dot_product_attention

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
        """The rope of one variant."""
        return FusedRope(spec, head_dim, dtype)
