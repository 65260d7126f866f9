"""Eight-bit floats with a scale per tensor, row, block or 32 inputs.

`weight` (out, in) F8_E4M3 times `weight_scale` or, in spite of its name, `weight_scale_inv`:
DeepSeek and Qwen (blocks of weight_block_size), compressed-tensors (float-quantized and mxfp8),
ModelOpt, FBGEMM. Scales that are powers of two are those of MLX's mxfp8, repeated for each 32
inputs.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError
from ....models.jsonfields import Fields
from ..base import Leaves, Reader, not_packed
from ..source import MLXFormat, Packed, TensorInfo
from ..stored import E4M3, FLOATS, Array, StoredArray, to_float32

_MXFP8 = MLXFormat(32, 8, "mxfp8")
BLOCK = (128, 128)
_POWERS = ("F8_E8M0", "U8")  # exponents, biased by 127


def read_block(config: Fields, key: str) -> tuple[int, int]:
    """The size of blocks as a config states it.

    Raises:
        CheckpointError: no pair of positive integers.
    """
    block = config.items(key)
    if block is None:
        return BLOCK
    if len(block) != 2 or not all(type(size) is int and 0 < size < 2**20 for size in block):
        raise CheckpointError(f"{key} in {config.where} is {str(block)[:60]}; expected two sizes.")
    return block[0], block[1]


class FP8:
    """The modules of any checkpoint that have eight-bit floats as weights."""

    def __init__(self, block: tuple[int, int] = BLOCK, *, powers: bool = False) -> None:
        self._block = block  # rows and inputs, where scales are for blocks
        self._powers = powers  # whether float scales are said to be powers of two

    def __call__(self, path: str, leaves: Leaves) -> Iterator[Reader]:
        """The matrix of a module with eight-bit floats as weights."""
        weight = leaves.get("weight")
        if weight is None or not weight.dtype.startswith("F8_E"):
            return
        del leaves["weight"]
        weight.expect(["F8_E4M3"])
        names = [leaf for leaf in ("weight_scale_inv", "weight_scale") if leaf in leaves]
        if names:
            yield _Scaled(path, weight, leaves.pop(names[0]), self._block, powers=self._powers)
        else:
            yield _Plain(path, weight)


class _Plain:
    """Values that were cast, without a scale. bfloat16 holds them all."""

    def __init__(self, path: str, weight: StoredArray) -> None:
        self.parts = (weight,)
        name = f"{path}.weight"
        self.info = TensorInfo(name, weight.shape, "bfloat16", "fp8", weight.num_bytes)

    def read(self, rows: slice) -> mx.array:
        """The value of each code."""
        return mx.array(self.parts[0].floats(rows)).astype(mx.bfloat16)

    def packed(self) -> Packed:
        """There are no scales."""
        raise not_packed(self.info)


class _Scaled:
    def __init__(
        self,
        path: str,
        weight: StoredArray,
        scale: StoredArray,
        block: tuple[int, int],
        *,
        powers: bool,
    ) -> None:
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise weight.fail(f"has shape {weight.shape}; expected (out, in)")
        scale.expect([*FLOATS, *_POWERS])
        self._block = _block_of(weight, scale, block)
        self.parts = (weight, scale)
        whole = self._block[1] % 32 == 0 and weight.shape[1] % 32 == 0
        exact = whole and (powers or scale.dtype in _POWERS)
        self.info = TensorInfo(
            name=f"{path}.weight",
            shape=weight.shape,
            dtype="float32",
            stored=f"fp8 {_described(weight.shape, self._block)}",
            stored_bytes=weight.num_bytes + scale.num_bytes,
            lossless=_MXFP8 if exact else None,
        )

    def read(self, rows: slice) -> mx.array:
        """Code times scale, rounded to float32 once."""
        weight, scale = self.parts
        values = E4M3[weight.view(rows)]
        dtype = "F8_E8M0" if scale.dtype in _POWERS else scale.dtype
        grid = to_float32(self._grid(), dtype)
        if self.info.shape[1] % self._block[1]:
            values *= self._spread(grid, rows, 1)
        else:  # the same without an array as large as the values
            of_row = grid[np.arange(rows.start, rows.stop) // self._block[0]]
            grouped = values.reshape(*of_row.shape, self._block[1])
            grouped *= of_row[..., None]
        return mx.array(values)

    def packed(self) -> Packed:
        """Codes as they are, and the exponent of each scale for each 32 inputs."""
        if self.info.lossless is None:
            raise not_packed(self.info)
        weight, scale = self.parts
        grid = self._grid()
        exponents = grid if scale.dtype in _POWERS else self._exponents(grid)
        if (exponents == 255).any():
            raise scale.fail("holds a scale that is no number")
        every = self._spread(exponents, slice(0, weight.shape[0]), 32)
        codes = np.ascontiguousarray(weight.view()).view(np.uint32)
        return Packed(mx.array(codes), mx.array(np.ascontiguousarray(every)), None)

    def _grid(self) -> Array:
        """The scales as (row blocks, column blocks)."""
        rows, columns = (
            -(-length // step) for length, step in zip(self.info.shape, self._block, strict=True)
        )
        return np.asarray(self.parts[1].view()).reshape(rows, columns)

    def _spread(self, grid: Array, rows: slice, step: int) -> Array:
        """One scale for each row and each `step` inputs."""
        of_row = np.arange(rows.start, rows.stop) // self._block[0]
        of_column = np.arange(0, self.info.shape[1], step) // self._block[1]
        return grid[of_row][:, of_column]

    def _exponents(self, grid: Array) -> Array:
        scale = self.parts[1]
        fraction, exponent = np.frexp(to_float32(grid, scale.dtype))
        biased = exponent.astype(np.int64) - 1 + 127
        if (fraction != 0.5).any() or biased.min() < 0 or biased.max() > 254:
            raise scale.fail("holds scales that are not powers of two, though scale_fmt says ue8m0")
        return biased.astype(np.uint8)


def _block_of(weight: StoredArray, scale: StoredArray, block: tuple[int, int]) -> tuple[int, int]:
    """How many rows and inputs share a scale; both at most as many as there are.

    Shapes are compared with their axes of length 1: (1, 2) is a row of two blocks, (2, 1) two rows.
    Where both fit, the block that the config states is meant.
    """
    out_dims, in_dims = weight.shape
    choices = [(min(block[0], out_dims), min(block[1], in_dims)), (out_dims, in_dims), (1, in_dims)]
    if scale.dtype in _POWERS:
        choices.append((1, 32))
    for rows, columns in choices:
        if scale.shape in _spellings(-(-out_dims // rows), -(-in_dims // columns)):
            return rows, columns
    raise scale.fail(
        f"has shape {scale.shape}, which is neither one scale, nor one for each row, nor one for "
        f"each block of {block} of {weight.shape}"
    )


def _spellings(rows: int, columns: int) -> list[tuple[int, ...]]:
    """The shapes that a grid of scales may have; ModelOpt's has an axis of 1 after each."""
    shapes: list[tuple[int, ...]] = [(rows, columns), (rows, 1, columns, 1)]
    if columns == 1:
        shapes.append((rows,))
    if rows == columns == 1:
        shapes.append(())
    return shapes


def _described(shape: tuple[int, ...], block: tuple[int, int]) -> str:
    if block == shape:
        return "per tensor"
    return "per row" if block == (1, shape[1]) else f"{block[0]}x{block[1]}"
