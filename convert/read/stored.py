"""Arrays in files, seen through a memory map.

Views cost no memory of the process: their pages belong to the file. A file is mapped for one read
and unmapped after the read, so deleting or replacing the file between reads does no harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointError
from ...models.weights.files import NUMPY

Array = NDArray[Any]

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PLAIN = {**FLOATS, "I64": "int64"}  # stored as they are: numbers of n-grams are whole


@dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """One array in one file."""

    name: str  # as the file calls it
    dtype: str  # a key of NUMPY
    shape: tuple[int, ...]
    path: Path  # of the file
    offset: int  # bytes from the start of the file
    file_bytes: int  # that the file had when its header was read

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * np.dtype(NUMPY[self.dtype]).itemsize

    def view(self, rows: slice = slice(None)) -> Array:
        """The stored numbers, or a range of the first axis; BF16 as uint16, F8 as uint8."""
        if self.num_bytes == 0:
            return np.zeros(self.shape, NUMPY[self.dtype])[rows]
        try:
            if self.path.stat().st_size != self.file_bytes:
                raise CheckpointError(f"{self.path} has changed while it was read; start again.")
            data = _mapped(self.path, self.offset, self.num_bytes).view(NUMPY[self.dtype])
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{self.path} cannot be read: {reason}.") from error
        return data.reshape(self.shape)[rows] if self.shape else data[0]

    def floats(self, rows: slice = slice(None)) -> Array:
        """The numbers as float32, which holds all of them exactly unless they are F64."""
        return to_float32(self.view(rows), self.dtype)

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"Tensor {self.name[:200]!r} of {self.path.name} {what}.")

    def expect(self, dtypes: Sequence[str], shape: Sequence[int] | None = None) -> "StoredArray":
        """Return the array itself; raise CheckpointError for another dtype or shape."""
        if self.dtype not in dtypes:
            raise self.fail(f"is {self.dtype}; expected {' or '.join(dtypes)}")
        if shape is not None and self.shape != tuple(shape):
            raise self.fail(f"has shape {self.shape}; expected {tuple(shape)}")
        return self


def _mapped(path: Path, offset: int, count: int) -> NDArray[np.uint8]:
    """Bytes of a file, mapped as long as a view of them is there.

    np.memmap resolves the path for each map, which takes longer than to map a small tensor.
    """
    start = offset - offset % ALLOCATIONGRANULARITY
    with path.open("rb", buffering=0) as file:
        data = mmap(file.fileno(), offset + count - start, access=ACCESS_READ, offset=start)
    return np.frombuffer(data, np.uint8, count, offset - start)


def to_float32(values: Array, dtype: str) -> Array:
    """Stored numbers of a dtype (a key of NUMPY) as float32."""
    if dtype == "BF16":
        return np.asarray((values.astype(np.uint32) << 16).view(np.float32))
    if dtype == "F8_E4M3":
        return E4M3[values]
    if dtype == "F8_E5M2":
        return E5M2[values]
    if dtype == "F8_E8M0":
        return np.asarray(np.ldexp(np.float32(1), values.astype(np.int32) - 127))
    return values.astype(np.float32)


def to_mlx(values: Array, dtype: str) -> mx.array:
    """Stored numbers of `PLAIN` as an MLX array of the same dtype."""
    array = mx.array(np.ascontiguousarray(values))
    return array.view(mx.bfloat16) if dtype == "BF16" else array


def _float8_table(exponent_bits: int, bias: int, *, has_infinity: bool) -> Array:
    """All 256 values of an eight-bit float (OCP 8-bit floating point specification, table 1)."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    scale = np.exp2(np.maximum(exponent, 1) - bias)
    values = np.where(exponent == 0, fraction, 1.0 + fraction) * scale
    top = (1 << exponent_bits) - 1
    if has_infinity:
        values[exponent == top] = np.nan
        values[(exponent == top) & (mantissa == 0)] = np.inf
    else:
        values[-1] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _float8_table(4, 7, has_infinity=False)
E5M2 = _float8_table(5, 15, has_infinity=True)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
