"""bfloat16 and float16 in numpy, which has no bfloat16. Knows no formats and no MLX.

Worker threads use numpy only: MLX belongs to the thread that reads.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RAW = {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)} | {
    "float32": np.dtype(np.float32)
}


def widen(raw: NDArray[np.generic], dtype: str) -> Floats:
    """What lies on disk as `dtype` (bfloat16 as uint16) -> float32."""
    if dtype == "bfloat16":
        wide: NDArray[np.uint32] = raw.astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)
    return np.asarray(raw, dtype=np.float32)


def narrow(values: Floats, dtype: str) -> NDArray[np.generic]:
    """float32 -> as it lies on disk, to the nearest, ties to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype(np.uint16)
    return values.astype(RAW[dtype])


def rounded(values: Floats, dtype: str) -> Floats:
    """float32 values that `dtype` holds exactly."""
    return widen(narrow(values, dtype), dtype)
