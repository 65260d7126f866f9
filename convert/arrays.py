"""MLX arrays as numpy's, and dtypes by name. Knows nothing else."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def as_numpy(array: mx.array) -> NDArray[np.generic]:
    """The array's own bytes, bfloat16 as uint16."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    mx.eval(array)
    found: NDArray[np.generic] = np.array(array, copy=False)
    return found


def mx_dtype(name: str) -> mx.Dtype:
    """bfloat16 -> mx.bfloat16."""
    return {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}[name]


def dtype_name(array: mx.array) -> str:
    """mx.bfloat16 -> bfloat16."""
    return {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}[array.dtype]
