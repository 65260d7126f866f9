"""Matrices that MLX quantised, in every format that MLX has.

`weight` (..., out, in * bits / 32) uint32, `scales` (..., out, in / group_size): floats, with
`biases`, for affine; uint8 for mxfp4, mxfp8 and nvfp4. config.json says which format a path has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ....models.quantization import QuantFormat, Quantization
from ..codes import AffineMatrix, Octets, Triple, affine_matrix, float_reader
from ..source import Leaves, SourceTensor, TensorReader
from ..stored import FLOATS, StoredArray


@dataclass(frozen=True, slots=True)
class MLXModules:
    """The modules of a checkpoint that MLX quantised."""

    quantization: Quantization

    def __call__(self, path: str, leaves: Leaves) -> Iterator[TensorReader]:
        if "scales" not in leaves or "weight" not in leaves:
            return
        weight, scales = leaves.pop("weight"), leaves.pop("scales")
        form = self.quantization.of(path)
        if form.mode == "affine":
            if "biases" not in leaves:
                raise weight.fail("has scales, but no biases beside it")
            yield _affine(path, (weight, scales, leaves.pop("biases")), form).reader()
        else:
            yield _floats(path, weight, scales, form)


def _shape(weight: StoredArray, scales: StoredArray, form: QuantFormat) -> tuple[int, ...]:
    if len(weight.expect(["U32"]).shape) not in (2, 3) or 0 in weight.shape:
        raise weight.fail(f"has shape {weight.shape}; expected (out, words) or with experts")
    *rows, words = weight.shape
    in_dims = words * 32 // form.bits
    if in_dims % form.group_size or in_dims * form.bits != words * 32:
        raise weight.fail(
            f"has shape {weight.shape}, which {form.bits} bits in groups of {form.group_size} "
            "do not divide"
        )
    kinds = [*FLOATS] if form.mode == "affine" else ["U8"]
    scales.expect(kinds, (*rows, in_dims // form.group_size))
    return (*rows, in_dims)


def _affine(
    path: str, arrays: tuple[StoredArray, StoredArray, StoredArray], form: QuantFormat
) -> AffineMatrix:
    weight, scales, biases = arrays
    shape = _shape(weight, scales, form)
    biases.expect([scales.dtype], scales.shape)

    def triple(rows: slice) -> Triple:
        return np.ascontiguousarray(weight.view(rows)), scales.floats(rows), biases.floats(rows)

    stored = f"MLX affine {form.bits}-bit"
    return affine_matrix(
        path, shape, arrays, triple, form, stored=stored, scales=scales, exact=True
    )


def _floats(path: str, weight: StoredArray, scales: StoredArray, form: QuantFormat) -> TensorReader:
    """mxfp4, mxfp8 and nvfp4; bfloat16 holds every value that is not too small for it."""
    shape = _shape(weight, scales, form)
    stored = f"MLX {form.mode} {form.bits}-bit g{form.group_size}"
    size = weight.num_bytes + scales.num_bytes

    def octets(rows: slice) -> Octets:
        return np.ascontiguousarray(weight.view(rows)).view(np.uint8), scales.view(rows)

    info = SourceTensor(f"{path}.weight", shape, "bfloat16", stored, size, form)
    return float_reader(info, (weight, scales), form, octets)
