"""Matrices as a checkpoint stores them, dense or packed, and the layers that are made of them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError
from ...layers.adapters import AdapterTarget, InputSlice, SourceRows
from ...layers.linear import (
    DenseHeadLinear,
    HeadLinear,
    Joined,
    Linear,
    Projection,
    QuantizedHeadLinear,
    QuantizedLinear,
    RotatedLinear,
    Rotation,
)
from ...layers.moe import (
    ExpertLinear,
    ExpertProjection,
    FactoredExperts,
    JoinedExperts,
    QuantizedExpertLinear,
)
from ..quantization import QuantFormat
from .tensors import Tensor, loaded, read_together, side_by_side


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One matrix, or one per expert: (..., out_dims, in_dims), packed where there is a format.

    It stays in its files until a layer is made of it, so matrices side by side are read as one.
    """

    weight: Tensor
    bias: mx.array | None = None  # (..., out_dims)
    scales: Tensor | None = None  # (..., out_dims, in_dims / group_size)
    biases: Tensor | None = None  # as scales; affine formats only
    form: QuantFormat | None = None  # None: dense
    rotation: Rotation | None = None  # of its inputs
    factors: mx.array | None = None  # (E,) float32, of each expert's outputs
    sources: tuple[SourceRows, ...] = ()  # of its outputs, where adapters may ask for them
    inputs: InputSlice | None = None  # that a rank has of a matrix with cut inputs
    targets: list[AdapterTarget] | None = None  # gets the layer as a target of adapters
    defer: "Deferral | None" = None  # makes the layer of experts that stay in their files

    @property
    def in_dims(self) -> int:
        """Number of inputs of the whole matrix; a rank may have a part of them."""
        words = self.weight.shape[-1]
        return words if self.form is None else words * 32 // self.form.bits

    def reordered(self, order: Sequence[int]) -> "StoredMatrix":
        rows = mx.array(list(order))
        (source,) = self.sources or (None,)
        chosen = () if source is None else (source.chosen(np.array(order, np.int32)),)
        return self._each(lambda array, axis: mx.take(array, rows, axis=axis), chosen)

    def by_head(self, num_heads: int) -> "StoredMatrix":
        return self._each(lambda array, axis: mx.unflatten(array, axis, (num_heads, -1)), ())

    def rows(self, start: int, stop: int) -> "StoredMatrix":
        """Return outputs [start, stop) of each head."""
        return self._each(lambda array, axis: mx.take(array, mx.arange(start, stop), axis=axis), ())

    def scaled(self, factors: mx.array | float, *, bias: bool = True) -> "StoredMatrix":
        """Return this matrix with its outputs multiplied.

        Args:
            factors: one for each output (..., out_dims), or one for all.
        """
        if self.form is not None and self.form.mode != "affine":
            raise UnsupportedModelError(
                f"Matrices of mode {self.form.mode!r} cannot be scaled, which this model needs."
            )
        factors = mx.array(factors, mx.float32)
        columns = factors[..., None] if factors.ndim else factors

        def product(tensor: Tensor | None, by: mx.array) -> mx.array | None:
            if tensor is None:
                return None
            return (loaded(tensor).astype(mx.float32) * by).astype(tensor.dtype)

        weight = loaded(self.weight)
        if self.form is None:
            weight = (weight.astype(mx.float32) * columns).astype(weight.dtype)
        scales, biases = product(self.scales, columns), product(self.biases, columns)
        offset = product(self.bias, factors) if bias else self.bias
        sources = tuple(source.scaled(factors) for source in self.sources)
        return replace(
            self,
            weight=weight,
            bias=offset,
            scales=scales,
            biases=biases,
            sources=sources,
            defer=None,
        )

    def _each(
        self, change: Callable[[mx.array, int], mx.array], sources: tuple[SourceRows, ...]
    ) -> "StoredMatrix":
        """Apply `change` to each field; it is given the axis of the outputs in that field."""
        return replace(
            self,
            weight=change(loaded(self.weight), -2),
            bias=None if self.bias is None else change(self.bias, -1),
            scales=None if self.scales is None else change(loaded(self.scales), -2),
            biases=None if self.biases is None else change(loaded(self.biases), -2),
            sources=sources,
            defer=None,
        )

    def packed(self) -> tuple[mx.array, mx.array, mx.array | None]:
        assert self.scales is not None
        if self.biases is None:
            weight, scales = read_together([self.weight, self.scales])
            return weight, scales, None
        weight, scales, biases = read_together([self.weight, self.scales, self.biases])
        return weight, scales, biases

    def head_linear(self) -> HeadLinear:
        if self.form is None:
            return DenseHeadLinear(loaded(self.weight))
        return QuantizedHeadLinear(*self.packed(), **asdict(self.form))

    def projection(self) -> Projection:
        made: Projection
        if self.form is None:
            made = Linear(loaded(self.weight), self.bias)
        else:
            made = QuantizedLinear(*self.packed(), self.bias, **asdict(self.form))
        if self.rotation is not None:
            made = RotatedLinear(made, self.rotation)
        self._note(made, None)
        return made

    def expert_projection(self) -> ExpertProjection:
        if self.defer is not None:
            return self.defer(self)
        made: ExpertProjection
        if self.form is None:
            made = ExpertLinear(for_experts(loaded(self.weight)), self.bias)
        else:
            made = QuantizedExpertLinear(*self.packed(), self.bias, **asdict(self.form))
        if self.factors is not None:
            made = FactoredExperts(made, self.factors)
        self._note(made, self.weight.shape[0])
        return made

    def _note(self, made: Projection | ExpertProjection, num_experts: int | None) -> None:
        if self.targets is not None and self.sources:
            self.targets.append(
                AdapterTarget(made, self.sources, self.in_dims, num_experts, self.inputs)
            )


def for_experts(weight: mx.array) -> mx.array:
    """Dense experts' matrices as products take them: MLX's CPU backend has float32 alone."""
    return weight if mx.metal.is_available() else weight.astype(mx.float32)


Deferral = Callable[[StoredMatrix], ExpertProjection]


def fused(parts: Sequence[StoredMatrix]) -> Projection:
    """Make one projection of matrices that read one input.

    Neighbours of one format, which read the input in one basis, become one matrix.
    """
    runs: list[list[StoredMatrix]] = []
    for part in parts:
        if runs and _alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    made = [_side_by_side(run).projection() for run in runs]
    return made[0] if len(made) == 1 else Joined(made)


def _alike(one: StoredMatrix, other: StoredMatrix) -> bool:
    if one.rotation is None or other.rotation is None:
        return one.form == other.form and one.rotation is other.rotation
    return one.form == other.form and one.rotation.equals(other.rotation)


def fused_experts(parts: Sequence[StoredMatrix]) -> ExpertProjection:
    """As `fused`, for matrices stacked by expert."""
    if len({part.form for part in parts}) > 1:
        return JoinedExperts([part.expert_projection() for part in parts])
    return _side_by_side(parts).expert_projection()


def _side_by_side(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    return combined(parts, side_by_side)


def combined(
    parts: Sequence[StoredMatrix], combine: Callable[[Sequence[Tensor], int], Tensor]
) -> StoredMatrix:
    """Join matrices of one format; `combine` joins a field along the axis of the outputs."""
    if len(parts) == 1:
        return parts[0]

    def field(tensors: Sequence[Tensor | None], axis: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return combine(present, axis) if present else None

    bias = field([part.bias for part in parts], -1)

    return replace(
        parts[0],
        weight=combine([part.weight for part in parts], -2),
        bias=None if bias is None else loaded(bias),
        scales=field([part.scales for part in parts], -2),
        biases=field([part.biases for part in parts], -2),
        sources=tuple(source for part in parts for source in part.sources),
    )
