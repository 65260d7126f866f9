"""Integer codes with a scale and a bias for each group: values and MLX's layout of them.

value = code * scale + bias, all products exact in float32 for codes of at most 8 bits and scales of
at most 17 significant bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..arrays import Words, unpack
from .base import not_packed
from .source import MLXFormat, Packed, TensorInfo
from .stored import Array, StoredArray

_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)
_MLX = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def affine_format(bits: int, group_size: int) -> MLXFormat | None:
    """The MLX format that holds such groups, if need be each as several smaller ones."""
    fits = [group for group in _GROUPS if group_size % group == 0]
    return MLXFormat(fits[0], bits, "affine") if fits and bits in _BITS else None


class AffineReader(ABC):
    """A matrix, or stacked matrices, of codes in groups along the last axis."""

    def __init__(
        self,
        info: TensorInfo,
        parts: Sequence[StoredArray],
        *,
        bits: int,
        group_size: int,
        scale_dtype: str,
    ) -> None:
        if scale_dtype == "bfloat16" and not info.scales_exact:
            scale_dtype = "float16"  # as many bytes, and an eighth of the error in -zero * scale
        self.info = replace(info, scales_dtype=scale_dtype)
        self.parts = parts
        self.bits = bits
        self.group_size = group_size  # of the source; MLX's may be a divisor
        self.scale_dtype = scale_dtype  # what Packed tries to have them in

    @abstractmethod
    def triple(self, rows: slice) -> tuple[Words, Array, Array]:
        """Words (n, ..., words) uint32, scales and biases (n, ..., groups) float32."""

    def read(self, rows: slice) -> mx.array:
        """float32 values, exact."""
        words, scales, biases = self.checked(rows)
        codes = unpack(words, self.bits, self.info.shape[-1])
        values = codes.reshape(*scales.shape, self.group_size).astype(np.float32)
        values *= scales[..., None]
        values += biases[..., None]
        return mx.array(values.reshape(codes.shape))

    def packed(self) -> Packed:
        """Codes as they are; each scale is repeated where MLX's groups are smaller."""
        form = self.info.lossless
        if form is None:
            raise not_packed(self.info)
        words, scales, biases = self.checked(slice(0, self.info.shape[0]))
        times = self.group_size // form.group_size
        if times > 1:
            scales, biases = (np.repeat(part, times, axis=-1) for part in (scales, biases))
        return Packed(mx.array(words), *self._in_scale_dtype(scales, biases))

    def checked(self, rows: slice) -> tuple[Words, Array, Array]:
        """triple(), all of it finite.

        Raises:
            CheckpointError: a scale or a zero point is not.
        """
        words, scales, biases = self.triple(rows)
        if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
            raise CheckpointError(f"{self.info.name} has scales that are infinite or no number.")
        return words, scales, biases

    def _in_scale_dtype(self, *parts: Array) -> tuple[mx.array, mx.array]:
        wide = [mx.array(np.ascontiguousarray(part)) for part in parts]
        narrow = [part.astype(_MLX[self.scale_dtype]) for part in wide]
        pairs = zip(wide, narrow, strict=True)
        exact = all(bool(mx.array_equal(w, n.astype(mx.float32))) for w, n in pairs)
        scales, biases = narrow if exact else wide
        return scales, biases


class MixedReader:
    """A matrix with inputs in groups of any order: values, but no format of MLX."""

    def __init__(self, matrix: AffineReader, group_of: StoredArray) -> None:
        self._matrix = matrix
        self._group_of = group_of  # (in,) the group of each input
        self.parts = (*matrix.parts, group_of)
        self.info = replace(
            matrix.info,
            stored=f"{matrix.info.stored} act-order",
            stored_bytes=matrix.info.stored_bytes + group_of.num_bytes,
            lossless=None,
            scales_exact=True,
        )

    def read(self, rows: slice) -> mx.array:
        """Each input with the scale and bias of its own group."""
        words, scales, biases = self._matrix.checked(rows)
        group_of = self._group_of.view().astype(np.int64)
        if group_of.min() < 0 or group_of.max() >= scales.shape[1]:
            raise self._group_of.fail(f"names a group that is not one of {scales.shape[1]}")
        values = unpack(words, self._matrix.bits, self.info.shape[1]).astype(np.float32)
        values *= scales[:, group_of]
        values += biases[:, group_of]
        return mx.array(values)

    def packed(self) -> Packed:
        """Raise: MLX has no layout for groups in any order."""
        raise not_packed(self.info)
