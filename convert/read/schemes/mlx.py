"""Matrices that MLX quantised, in every format that MLX has.

`weight` (..., out, in * bits / 32) uint32, `scales` (..., out, in / group_size): floats, with
`biases`, for affine; uint8 for mxfp4, mxfp8 and nvfp4. config.json says which format a path has;
where it leaves out an exception, the width that the architecture gives the matrix decides.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import ModelError
from ....models.config import normalise
from ....models.quantization import QuantFormat, Quantization, format_of_shapes
from ....models.registry import family
from ....models.weights.placing import NOWHERE
from ....models.weights.share import Share
from ....models.weights.source import Rename, Slices
from ....models.weights.tensors import Tensor
from ....models.weights.weights import Weights
from ..affine import AffineMatrix, Triple, affine_info
from ..source import Leaves, Reader, TensorInfo
from ..stored import E4M3, FLOATS, StoredArray, to_float32
from .floats import as_stored, fp4_values

Widths = Callable[[str], int | None]
"""The inputs of the matrix at a path; None: not known."""

_EXPERT = re.compile(r"\.\d+(?=\.[^.]+$)")  # its number, the last one of a path


def widths_of(config: Mapping[str, Any]) -> Widths:
    """For the matrices of a model; `config` says nothing of quantisation.

    They are those that the model's own definition asks for. Where the config is invalid no width is
    known; arrange() raises the error.
    """

    @cache
    def found() -> tuple[Rename, dict[str, int]]:
        try:
            model = normalise(config)
            builder = family(model.model_type)
            asked: dict[str, int] = {}
            for has_all in (False, True):  # of what is stored in two ways, both
                source = _AnyTensors(asked, has_all=has_all)
                weights = Weights(source, NOWHERE, dtype="float32")
                builder.build(replace(model, quantization=None), weights)
        except ModelError:
            return (lambda name: None), {}
        return builder.tensor_name, asked

    def width(path: str) -> int | None:
        rename, asked = found()
        ours = (rename(f"{path}.weight") or "").removesuffix(".weight")
        return asked.get(ours) or asked.get(_EXPERT.sub(".{}", ours))

    return width


class _AnyTensors:
    """A `Source` of tensors of any name and shape that a model asks for.

    Args:
        widths: gets the inputs of each matrix that is asked for.
        has_all: whether a tensor is said to be there before it is asked for.
    """

    def __init__(self, widths: dict[str, int], *, has_all: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.share: Share | None = None
        self.num_bytes = 0
        self._widths, self._has_all = widths, has_all

    def __contains__(self, name: str) -> bool:
        return self._has_all and not name.endswith(".scales")

    def original(self, name: str) -> str:
        """The same."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Of no tensor."""
        return ()

    def has_shape(self, name: str, shape: Sequence[int]) -> bool:
        """No shape is known."""
        return False

    def take(self, name: str, shape: Sequence[int], parts: Sequence[int] | None = None) -> Tensor:
        """Of this shape, never computed."""
        path, _, field = name.rpartition(".")
        if field == "weight" and len(shape) > 1:
            self._widths[path] = shape[-1]
        return mx.zeros(shape)

    def rows(self, name: str) -> Tensor:
        """Nothing, as of every tensor, so that tables are taken for equal."""
        return mx.zeros(0)

    def slices(self, name: str) -> Slices | None:
        """All is taken whole."""
        return None

    def stored_apart(self, stack: str, each: str, shape: tuple[int, int, int]) -> bool:
        """In one; the widths are noted of both."""
        self._widths[each] = shape[-1]
        return False

    def drop(self, *names: str) -> None:
        """There is nothing to drop."""


class MLXModules:
    """The modules of a checkpoint that MLX quantised."""

    def __init__(self, quantization: Quantization, widths: Widths) -> None:
        self._quantization = quantization
        self._widths = widths

    def __call__(self, path: str, leaves: Leaves) -> Iterator[Reader]:
        """The matrix of a module that has scales."""
        if "scales" not in leaves or "weight" not in leaves:
            return
        weight, scales = leaves.pop("weight"), leaves.pop("scales")
        form = self._format_of(path, weight, scales)
        if form.mode == "affine":
            if "biases" not in leaves:
                raise weight.fail("has scales, but no biases beside it")
            yield _affine(path, (weight, scales, leaves.pop("biases")), form).reader()
        else:
            yield _floats(path, weight, scales, form)

    def _format_of(self, path: str, weight: StoredArray, scales: StoredArray) -> QuantFormat:
        """As `models.weights` finds it, so that a model that runs can be converted."""
        width, fitting = self._widths(path), None
        if width is not None and weight.shape and scales.shape:
            fitting = format_of_shapes(
                width, weight.shape[-1], scales.shape[-1], integer_scales=scales.dtype == "U8"
            )
        return self._quantization.of(path, fitting)


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
