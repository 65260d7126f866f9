"""Integer codes with a scale and a bias for each group: values and MLX's layout of them.

value = code * scale + bias, all products exact in float32 for codes of at most 8 bits and scales of
at most 17 significant bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..arrays import Words, mx_dtype, unpack
from .source import MLXFormat, Packed, Reader, TensorInfo
from .stored import Array, StoredArray

_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)

Triple = tuple[Words, Array, Array]
"""Words (n, ..., words) uint32, scales and biases (n, ..., groups) float32."""


def affine_format(bits: int, group_size: int) -> MLXFormat | None:
    """The MLX format that holds such groups, if need be each as several smaller ones."""
    fits = [group for group in _GROUPS if group_size % group == 0]
    return MLXFormat(fits[0], bits, "affine") if fits and bits in _BITS else None


@dataclass(frozen=True, slots=True)
class AffineMatrix:
    """A matrix, or stacked matrices, of codes in groups along the last axis."""

    info: TensorInfo
    parts: Sequence[StoredArray]
    bits: int
    group_size: int  # of the source; that of MLX's format may be a divisor
    triple: Callable[[slice], Triple]  # of a range of the first axis

    def reader(self) -> Reader:
        """Exact values, and codes where MLX has a format for them."""
        codes = None if self.info.lossless is None else self._packed
        return Reader(self.info, self.parts, self._values, codes)

    def mixed(self, group_of: StoredArray) -> Reader:
        """The reader where inputs lie in groups of any order: values, but no format of MLX.

        Args:
            group_of: (in_dims,) the group of each input.
        """
        info = replace(
            self.info,
            stored=f"{self.info.stored} act-order",
            stored_bytes=self.info.stored_bytes + group_of.num_bytes,
            lossless=None,
            scales_exact=True,
        )

        def values(rows: slice) -> mx.array:
            words, scales, biases = self._checked(rows)
            groups = group_of.view().astype(np.int64)
            if groups.min() < 0 or groups.max() >= scales.shape[1]:
                raise group_of.fail(f"names a group that is not one of {scales.shape[1]}")
            found = unpack(words, self.bits, info.shape[1]).astype(np.float32)
            found *= scales[:, groups]
            found += biases[:, groups]
            return mx.array(found)

        return Reader(info, (*self.parts, group_of), values)

    def _values(self, rows: slice) -> mx.array:
        words, scales, biases = self._checked(rows)
        codes = unpack(words, self.bits, self.info.shape[-1])
        values = codes.reshape(*scales.shape, self.group_size).astype(np.float32)
        values *= scales[..., None]
        values += biases[..., None]
        return mx.array(values.reshape(codes.shape))

    def _packed(self) -> Packed:
        """Codes as they are; each scale is repeated where MLX's groups are smaller."""
        assert self.info.lossless is not None
        words, scales, biases = self._checked(slice(0, self.info.shape[0]))
        times = self.group_size // self.info.lossless.group_size
        if times > 1:
            scales, biases = (np.repeat(part, times, axis=-1) for part in (scales, biases))
        wide = [mx.array(np.ascontiguousarray(part)) for part in (scales, biases)]
        narrow = [part.astype(mx_dtype(self.info.scales_dtype)) for part in wide]
        pairs = zip(wide, narrow, strict=True)
        exact = all(bool(mx.array_equal(w, n.astype(mx.float32))) for w, n in pairs)
        return Packed(mx.array(words), *(narrow if exact else wide))

    def _checked(self, rows: slice) -> Triple:
        """triple(), all of it finite.

        Raises:
            CheckpointError: a scale or a zero point is not.
        """
        words, scales, biases = self.triple(rows)
        if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
            raise CheckpointError(f"{self.info.name} has scales that are infinite or no number.")
        return words, scales, biases


def affine_info(
    path: str,
    shape: tuple[int, ...],
    parts: Sequence[StoredArray],
    *,
    stored: str,
    lossless: MLXFormat | None,
    scale_dtype: str,
    exact: bool,
) -> TensorInfo:
    """The description of the weight of the module at a path.

    Args:
        scale_dtype: of scales and biases where MLX's format has them, as far as it holds them.
        exact: whether it holds them all.
    """
    if scale_dtype == "bfloat16" and not exact:
        scale_dtype = "float16"  # as many bytes, and an eighth of the error in -zero * scale
    return TensorInfo(
        name=f"{path}.weight",
        shape=shape,
        dtype="float32",
        stored=stored,
        stored_bytes=sum(part.num_bytes for part in parts),
        lossless=lossless,
        scales_exact=exact,
        scales_dtype=scale_dtype,
    )
