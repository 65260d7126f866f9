"""Floats of eight and four bits with scales.

Eight bits: `weight` (out, in) F8_E4M3 times `weight_scale`, `scale` (DeepSeek V4) or, in spite of
its name, `weight_scale_inv`, for a tensor, row, block or 32 inputs: DeepSeek and Qwen (blocks of
weight_block_size), compressed-tensors (float-quantized and mxfp8), ModelOpt, FBGEMM. Scales that
are powers of two are those of MLX's mxfp8, repeated for each 32 inputs.

Four bits with a scale for 16 or 32 inputs. compressed-tensors: weight_packed, weight_scale, and for
nvfp4 weight_global_scale, which divides. ModelOpt: weight, weight_scale, and weight_scale_2, which
multiplies. DeepSeek V4: weight as signed bytes, scale. MLX's nvfp4 has no third scale. A matrix
with one has values only, no codes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError
from ....models.jsonfields import Fields
from ..codes import float_reader
from ..source import Leaves, MLXFormat, Packed, SourceTensor, TensorReader
from ..stored import E4M3, FLOATS, Array, StoredArray, to_float32

MXFP8, MXFP4 = MLXFormat(32, 8, "mxfp8"), MLXFormat(32, 4, "mxfp4")
NVFP4 = MLXFormat(16, 4, "nvfp4")
BLOCK = (128, 128)
_POWERS = ("F8_E8M0", "U8")  # exponents, biased by 127


def read_block(config: Fields, key: str) -> tuple[int, int]:
    """The size of blocks as a config states it."""
    block = config.items(key)
    if block is None:
        return BLOCK
    if len(block) != 2 or not all(type(size) is int and 0 < size < 2**20 for size in block):
        raise CheckpointError(f"{key} in {config.where} is {str(block)[:60]}; expected two sizes.")
    return block[0], block[1]


@dataclass(frozen=True, slots=True)
class FP8:
    """The modules of any checkpoint that have eight-bit floats as weights."""

    block: tuple[int, int] = BLOCK  # rows and inputs, where scales are for blocks
    powers: bool = False  # whether float scales are said to be powers of two

    def __call__(self, path: str, leaves: Leaves) -> Iterator[TensorReader]:
        weight = leaves.get("weight")
        if weight is None or not weight.dtype.startswith("F8_E"):
            return
        del leaves["weight"]
        weight.expect(["F8_E4M3"])
        known = "weight_scale_inv", "weight_scale", "scale"
        names = [leaf for leaf in known if leaf in leaves]
        if names:
            scale = leaves.pop(names[0])
            yield ScaledMatrix(weight, scale, _block_of(weight, scale, self.block)).reader(
                f"{path}.weight", self.powers
            )
        else:  # values that were cast, without a scale; bfloat16 holds them all
            info = SourceTensor(f"{path}.weight", weight.shape, "bfloat16", "fp8", weight.num_bytes)
            yield TensorReader(
                info, (weight,), lambda rows: mx.array(weight.floats(rows)).astype(mx.bfloat16)
            )


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A matrix of eight-bit floats, with a scale for each block of rows and inputs.

    With `shards` its rows are that number of matrices, each with blocks of its own.
    """

    weight: StoredArray
    scale: StoredArray
    block: tuple[int, int]
    shards: int = 1

    def reader(self, name: str, powers: bool) -> TensorReader:
        weight, scale = self.weight, self.scale
        whole = self.block[1] % 32 == 0 and weight.shape[1] % 32 == 0
        exact = whole and (powers or scale.dtype in _POWERS)
        info = SourceTensor(
            name=name,
            shape=weight.shape,
            dtype="float32",
            stored=f"fp8 {_described(weight.shape, self.block)}",
            stored_bytes=weight.num_bytes + scale.num_bytes,
            lossless=MXFP8 if exact else None,
        )
        return TensorReader(info, (weight, scale), self._values, self._codes if exact else None)

    def _values(self, rows: slice) -> mx.array:
        """Code times scale, rounded to float32 once."""
        values = E4M3[self.weight.view(rows)]
        dtype = "F8_E8M0" if self.scale.dtype in _POWERS else self.scale.dtype
        grid = to_float32(self._grid(), dtype)
        if self.weight.shape[1] % self.block[1]:
            values *= self._spread(grid, rows, 1)
        else:  # the same without an array as large as the values
            of_row = grid[self._row_blocks(rows)]
            grouped = values.reshape(*of_row.shape, self.block[1])
            grouped *= of_row[..., None]
        return mx.array(values)

    def _codes(self, rows: slice) -> Packed:
        """Codes as they are, and the exponent of each scale for each 32 inputs."""
        grid = self._grid()
        exponents = grid if self.scale.dtype in _POWERS else self._exponents(grid)
        if (exponents == 255).any():
            raise self.scale.fail("holds a scale that is no number")
        every = self._spread(exponents, rows, 32)
        codes = np.ascontiguousarray(self.weight.view(rows)).view(np.uint32)
        return Packed(mx.array(codes), mx.array(np.ascontiguousarray(every)), None)

    def _grid(self) -> Array:
        """The scales as (row blocks, column blocks)."""
        columns = -(-self.weight.shape[1] // self.block[1])
        rows = self.shards * self._blocks_of_shard
        return np.asarray(self.scale.view()).reshape(rows, columns)

    @property
    def _blocks_of_shard(self) -> int:
        return -(-self.weight.shape[0] // self.shards // self.block[0])

    def _row_blocks(self, rows: slice) -> Array:
        """(N,) for each row of the matrix, the row of scales that belongs to it."""
        shard, row = np.divmod(
            np.arange(rows.start, rows.stop), self.weight.shape[0] // self.shards
        )
        return np.asarray(shard * self._blocks_of_shard + row // self.block[0])

    def _spread(self, grid: Array, rows: slice, step: int) -> Array:
        of_row = self._row_blocks(rows)
        of_column = np.arange(0, self.weight.shape[1], step) // self.block[1]
        return grid[of_row][:, of_column]

    def _exponents(self, grid: Array) -> Array:
        fraction, exponent = np.frexp(to_float32(grid, self.scale.dtype))
        biased = exponent.astype(np.int64) - 1 + 127
        if (fraction != 0.5).any() or biased.min() < 0 or biased.max() > 254:
            raise self.scale.fail(
                "holds scales that are not powers of two, though scale_fmt says ue8m0"
            )
        return biased.astype(np.uint8)


def _block_of(weight: StoredArray, scale: StoredArray, block: tuple[int, int]) -> tuple[int, int]:
    """How many rows and inputs share a scale; both at most as many as there are.

    Shapes are compared with their axes of length 1: (1, 2) is a row of two blocks, (2, 1) two rows.
    Where both fit, the block that the config states is meant.
    """
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise weight.fail(f"has shape {weight.shape}; expected (out, in)")
    scale.expect([*FLOATS, *_POWERS])
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


def fp4_modules(path: str, leaves: Leaves) -> Iterator[TensorReader]:
    name = "weight_packed" if "weight_packed" in leaves else "weight"
    codes = leaves.get(name)
    scales = {"U8": "weight_scale", "I8": "scale"}.get("" if codes is None else codes.dtype, "")
    if codes is None or scales not in leaves:
        return
    scale = leaves.pop(scales)
    del leaves[name]
    divisor, factor = (leaves.pop(n, None) for n in ("weight_global_scale", "weight_scale_2"))
    yield _fp4_matrix(f"{path}.weight", codes, scale, divisor, factor)


def _fp4_matrix(
    name: str,
    codes: StoredArray,
    scale: StoredArray,
    divisor: StoredArray | None,
    factor: StoredArray | None,
) -> TensorReader:
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise codes.fail(f"has shape {codes.shape}; expected (out, in / 2)")
    form = NVFP4 if scale.expect(["F8_E4M3", "F8_E8M0", "U8"]).dtype == "F8_E4M3" else MXFP4
    out_dims, in_dims = codes.shape[0], codes.shape[1] * 2
    if in_dims % 32:
        raise codes.fail(f"has {in_dims} inputs, which 32 does not divide")
    scale.expect([scale.dtype], (out_dims, in_dims // form.group_size))
    third = divisor or factor
    if third is not None and (third.expect(["F32"]).shape not in ((), (1,))):
        raise third.fail(f"has shape {third.shape}; expected one number")
    parts = (codes, scale, third) if third else (codes, scale)

    def rescaled(steps: Array) -> Array:
        if third is None:
            return steps
        whole = np.float32(np.asarray(third.view()).reshape(()))
        return steps * whole if divisor is None else steps / whole

    info = SourceTensor(
        name=name,
        shape=(out_dims, in_dims),
        dtype="float32" if third else "bfloat16",
        stored=f"{form.mode} g{form.group_size}" + (" with a global scale" if third else ""),
        stored_bytes=sum(part.num_bytes for part in parts),
        lossless=None if third else form,
    )
    return float_reader(
        info,
        parts,
        form,
        lambda rows: (codes.view(rows).view(np.uint8), scale.view(rows)),
        rescaled,
    )
