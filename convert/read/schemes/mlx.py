"""Matrices that MLX quantised, in every format that MLX has.

`weight` (..., out, in * bits / 32) uint32, `scales` (..., out, in / group_size): floats, with
`biases`, for affine; uint8 for mxfp4, mxfp8 and nvfp4. config.json says which format a path has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ....models.quantization import QuantFormat, Quantization
from ..affine import AffineMatrix, Triple, affine_info
from ..source import Leaves, Reader, TensorInfo
from ..stored import E4M3, FLOATS, StoredArray, to_float32
from .floats import as_stored, fp4_values


@dataclass(frozen=True, slots=True)
class MLXModules:
    """The modules of a checkpoint that MLX quantised."""

    quantization: Quantization

    def __call__(self, path: str, leaves: Leaves) -> Iterator[Reader]:
        """The matrix of a module that has scales."""
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
        """As stored."""
        return np.ascontiguousarray(weight.view(rows)), scales.floats(rows), biases.floats(rows)

    info = affine_info(
        path,
        shape,
        arrays,
        stored=_described(form),
        lossless=form,
        scale_dtype=FLOATS[scales.dtype],
        exact=scales.dtype != "F32",
    )
    return AffineMatrix(info, arrays, form.bits, form.group_size, triple)


def _floats(path: str, weight: StoredArray, scales: StoredArray, form: QuantFormat) -> Reader:
    """mxfp4, mxfp8 and nvfp4; bfloat16 holds every value that is not too small for it."""
    shape = _shape(weight, scales, form)

    def values(rows: slice) -> mx.array:
        """Code times scale."""
        steps = to_float32(scales.view(rows), "F8_E4M3" if form.mode == "nvfp4" else "F8_E8M0")
        octets = np.ascontiguousarray(weight.view(rows)).view(np.uint8)
        if form.bits == 4:
            return mx.array(fp4_values(octets, steps)).astype(mx.bfloat16)
        found = E4M3[octets].reshape(*steps.shape, -1)
        found *= steps[..., None]
        return mx.array(found.reshape(octets.shape)).astype(mx.bfloat16)

    size = weight.num_bytes + scales.num_bytes
    info = TensorInfo(f"{path}.weight", shape, "bfloat16", _described(form), size, form)
    return Reader(info, (weight, scales), values, lambda: as_stored(weight, scales))


def _described(form: QuantFormat) -> str:
    return f"MLX {form.mode} {form.bits}-bit g{form.group_size}"
