"""Matrices that read the same input made into one: fewer operations a token. Knows no names."""

from collections.abc import Sequence

import mlx.core as mx

from ..layers.linear import Joined, Linear, Projection, QuantizedLinear


def fuse(parts: Sequence[Linear | QuantizedLinear]) -> Projection:
    """One projection whose output is the parts' outputs, side by side.

    Parts of different formats stay apart, and their outputs are joined.
    """
    dense = [part for part in parts if isinstance(part, Linear)]
    packed = [part for part in parts if isinstance(part, QuantizedLinear)]
    if not packed:
        weight = mx.concatenate([part.transposed.T for part in dense])
        return Linear(weight, _stack([part.bias for part in dense]))
    formats = {(part.group_size, part.bits, part.mode) for part in packed}
    if dense or len(formats) > 1:
        return Joined(list(parts))
    group_size, bits, mode = formats.pop()
    return QuantizedLinear(
        mx.concatenate([part.weight for part in packed]),
        mx.concatenate([part.scales for part in packed]),
        _stack([part.biases for part in packed]),
        _stack([part.bias for part in packed]),
        group_size=group_size,
        bits=bits,
        mode=mode,
    )


def _stack(arrays: Sequence[mx.array | None]) -> mx.array | None:
    present = [array for array in arrays if array is not None]
    return mx.concatenate(present) if present else None
