"""4-bit weights: the layout that is shipped, and its rounding as training sees it."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

BITS, GROUP_SIZE = 4, 64


def quantised(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return named weights: a matrix as `weight`, `scales` and `biases`, the rest in bf16."""
    out: dict[str, mx.array] = {}
    for name, value in weights.items():
        value = value.astype(mx.bfloat16)
        if value.ndim < 2:
            out[name] = value
            continue
        stem = name.removesuffix(".weight")
        packed, scales, biases = mx.quantize(value, group_size=GROUP_SIZE, bits=BITS)
        out |= {name: packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
    return out


def rounded(params: Any) -> Any:
    """Return a parameter tree of matrices that have the values that 4 bits can hold.

    Gradients pass straight through the rounding (arXiv:1308.3432), so that the last part of
    training fits the weights to the form in which they are shipped.
    """
    return tree_map(_rounded, params)


def _rounded(value: mx.array) -> mx.array:
    if value.ndim < 2:
        return value
    packed = mx.quantize(mx.stop_gradient(value).astype(mx.bfloat16), GROUP_SIZE, BITS)
    shipped = mx.dequantize(*packed, GROUP_SIZE, BITS).astype(value.dtype)
    return value + mx.stop_gradient(shipped - value)
