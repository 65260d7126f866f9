"""What reads one tensor of a source, and the rows that are asked for. Knows no format."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from ...errors import CheckpointError
from .source import Packed, TensorInfo
from .stored import FLOATS, StoredArray, to_mlx


class Reader(Protocol):
    """One tensor, whatever it is made of."""

    @property
    def info(self) -> TensorInfo:
        """What is known without reading it."""
        ...

    @property
    def parts(self) -> Sequence[StoredArray]:
        """The arrays that it is made of; the first decides its place in the order."""
        ...

    def read(self, rows: slice) -> mx.array:
        """Values of a range of the first axis; bounds are within it, the step is 1."""
        ...

    def packed(self) -> Packed:
        """As TensorInfo.lossless says."""
        ...


def bounded(rows: slice | None, length: int, name: str) -> slice:
    """`rows` as a slice from start to stop within an axis of `length`.

    Raises:
        ValueError: a step other than 1.
    """
    start, stop, step = (rows or slice(None)).indices(length)
    if step != 1:
        raise ValueError(f"rows of {name} come with step {step}; expected 1")
    return slice(start, max(start, stop))


class Dense:
    """Values as they are stored."""

    def __init__(self, name: str, array: StoredArray) -> None:
        dtype = FLOATS.get(array.dtype)
        if dtype is None:
            raise array.fail(f"is {array.dtype}; expected {' or '.join(FLOATS)}")
        self.parts = (array,)
        self.info = TensorInfo(name, array.shape, dtype, array.dtype.lower(), array.num_bytes)

    def read(self, rows: slice) -> mx.array:
        """As stored."""
        (array,) = self.parts
        return to_mlx(array.view(rows) if array.shape else array.view(), array.dtype)

    def packed(self) -> Packed:
        """There are no codes."""
        raise not_packed(self.info)


def not_packed(info: TensorInfo) -> CheckpointError:
    """What read_packed() raises for a tensor without a lossless format."""
    return CheckpointError(
        f"{info.name} is stored as {info.stored}, which no MLX format holds; read its values."
    )
