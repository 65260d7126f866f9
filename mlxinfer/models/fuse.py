"""Matrices that read the same input made into one: fewer operations a token. Knows no names."""

from collections.abc import Sequence
from typing import TypedDict

import mlx.core as mx

from ..errors import CheckpointError
from ..layers.linear import Joined, Linear, Projection, QuantizedLinear
from ..layers.moe import ExpertLinear, ExpertProjection, JoinedExperts, QuantizedExpertLinear


def fuse(parts: Sequence[Linear | QuantizedLinear]) -> Projection:
    """One projection whose output is the parts' outputs, side by side.

    Parts of different formats stay apart, and their outputs are joined.
    """
    dense = [part for part in parts if isinstance(part, Linear)]
    packed = [part for part in parts if isinstance(part, QuantizedLinear)]
    if not packed:
        return Linear(*_dense(dense))
    if dense or not _one_format(packed):
        return Joined(list(parts))
    return QuantizedLinear(*_packed(packed), **_format(packed[0]))


def fuse_experts(parts: Sequence[ExpertLinear | QuantizedExpertLinear]) -> ExpertProjection:
    """The same for matrices that are stacked by expert."""
    dense = [part for part in parts if isinstance(part, ExpertLinear)]
    packed = [part for part in parts if isinstance(part, QuantizedExpertLinear)]
    if not packed:
        return ExpertLinear(*_dense(dense))
    if dense or not _one_format(packed):
        return JoinedExperts(list(parts))
    return QuantizedExpertLinear(*_packed(packed), **_format(packed[0]))


def stack_experts(
    parts: Sequence[Linear | QuantizedLinear],
) -> ExpertLinear | QuantizedExpertLinear:
    """One matrix per expert, stacked by expert; all of one format."""
    dense = [part for part in parts if isinstance(part, Linear)]
    packed = [part for part in parts if isinstance(part, QuantizedLinear)]
    if not packed:
        return ExpertLinear(mx.stack([part.transposed.T for part in dense]))
    if dense or not _one_format(packed):
        raise CheckpointError("Experts of one layer have different formats; expected one format.")
    biases = [part.biases for part in packed if part.biases is not None]
    return QuantizedExpertLinear(
        mx.stack([part.weight for part in packed]),
        mx.stack([part.scales for part in packed]),
        mx.stack(biases) if biases else None,
        **_format(packed[0]),
    )


def _dense(parts: Sequence[Linear | ExpertLinear]) -> tuple[mx.array, mx.array | None]:
    weight = mx.concatenate([part.transposed.swapaxes(-1, -2) for part in parts], axis=-2)
    return weight, _joined([part.bias for part in parts], axis=-1)


def _packed(
    parts: Sequence[QuantizedLinear | QuantizedExpertLinear],
) -> tuple[mx.array, mx.array, mx.array | None, mx.array | None]:
    return (
        mx.concatenate([part.weight for part in parts], axis=-2),
        mx.concatenate([part.scales for part in parts], axis=-2),
        _joined([part.biases for part in parts], axis=-2),
        _joined([part.bias for part in parts], axis=-1),
    )


def _one_format(parts: Sequence[QuantizedLinear | QuantizedExpertLinear]) -> bool:
    return all(_format(part) == _format(parts[0]) for part in parts)


def _format(part: QuantizedLinear | QuantizedExpertLinear) -> "_Format":
    return {"group_size": part.group_size, "bits": part.bits, "mode": part.mode}


class _Format(TypedDict):
    group_size: int
    bits: int
    mode: str


def _joined(arrays: Sequence[mx.array | None], *, axis: int) -> mx.array | None:
    present = [array for array in arrays if array is not None]
    return mx.concatenate(present, axis=axis) if present else None
