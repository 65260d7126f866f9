"""A matrix as a checkpoint holds it, and how several become one. Knows formats, not names.

Matrices that read the same input are fused, outputs side by side: fewer operations a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx

from ..errors import CheckpointError
from ..layers.experts import (
    ExpertProjection,
    JoinedExperts,
    QuantizedExpertLinear,
    dense_experts,
)
from ..layers.linear import Joined, Projection, dense
from ..layers.quantized import QuantizedLinear
from .quantization import QuantFormat


@dataclass(frozen=True, slots=True)
class Stored:
    """One matrix, or one per expert: (..., out_dims, in_dims), packed where there is a format."""

    weight: mx.array
    bias: mx.array | None = None  # (..., out_dims)
    scales: mx.array | None = None  # (..., out_dims, in_dims / group_size)
    biases: mx.array | None = None  # as scales; affine formats only
    form: QuantFormat | None = None  # None: dense

    def projection(self) -> Projection:
        """Of one matrix."""
        if self.form is None:
            return dense(self.weight, self.bias)
        assert self.scales is not None
        return QuantizedLinear(
            self.weight, self.scales, self.biases, self.bias, **asdict(self.form)
        )

    def expert_projection(self) -> ExpertProjection:
        """Of one matrix per expert."""
        if self.form is None:
            return dense_experts(self.weight, self.bias)
        assert self.scales is not None
        return QuantizedExpertLinear(
            self.weight, self.scales, self.biases, self.bias, **asdict(self.form)
        )


def fused(parts: Sequence[Stored]) -> Projection:
    """One projection of one input; parts of different formats stay apart."""
    if _formats(parts) > 1:
        return Joined([part.projection() for part in parts])
    return _side_by_side(parts).projection()


def fused_experts(parts: Sequence[Stored]) -> ExpertProjection:
    """The same for matrices that are stacked by expert."""
    if _formats(parts) > 1:
        return JoinedExperts([part.expert_projection() for part in parts])
    return _side_by_side(parts).expert_projection()


def stacked(parts: Sequence[Stored]) -> Stored:
    """One matrix per expert, as one array.

    Raises:
        CheckpointError: the experts have different formats.
    """
    if _formats(parts) > 1:
        raise CheckpointError("Experts of one layer have different formats; expected one format.")
    return _combined(parts, lambda arrays, _: mx.stack(arrays))


def _formats(parts: Sequence[Stored]) -> int:
    return len({part.form for part in parts})


def _side_by_side(parts: Sequence[Stored]) -> Stored:
    return _combined(parts, lambda arrays, axis: mx.concatenate(arrays, axis=axis))


def _combined(
    parts: Sequence[Stored], combine: Callable[[list[mx.array], int], mx.array]
) -> Stored:
    """`combine` field by field, given the axis of the outputs in that field."""
    if len(parts) == 1:
        return parts[0]

    def field(arrays: list[mx.array | None], axis: int) -> mx.array | None:
        present = [array for array in arrays if array is not None]
        return combine(present, axis) if present else None

    return Stored(
        combine([part.weight for part in parts], -2),
        field([part.bias for part in parts], -1),
        field([part.scales for part in parts], -2),
        field([part.biases for part in parts], -2),
        parts[0].form,
    )
