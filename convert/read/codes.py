"""Codes in groups along the last axis: read as values, or laid out as MLX stores them.

Integers have a scale and a bias for each group. value = code * scale + bias, all products exact in
float32 for codes of at most 8 bits and scales of at most 17 significant bits.

Floats of four bits (E2M1, two to a byte, the first in the low half) or eight (E4M3) have a scale of
eight bits: a power of two (E8M0), or E4M3 for nvfp4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..arrays import mx_dtype, unpack
from .source import MLXFormat, Packed, SourceTensor, TensorReader
from .stored import E2M1, E4M3, FLOATS, Array, StoredArray, to_float32

_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)

Triple = tuple[Array, Array, Array]
"""Words (n, ..., words) uint32 or codes (n, ..., in_dims) uint8, and scales and biases
(n, ..., groups) float32."""


def affine_format(bits: int, group_size: int) -> MLXFormat | None:
    fits = [group for group in _GROUPS if group_size % group == 0]
    return MLXFormat(fits[0], bits, "affine") if fits and bits in _BITS else None


@dataclass(frozen=True, slots=True)
class AffineMatrix:
    """A matrix, or stacked matrices, of codes in groups along the last axis."""

    info: SourceTensor
    parts: Sequence[StoredArray]
    group_size: int  # of the source; that of MLX's format may be a divisor
    words: Callable[[slice], Triple]  # of a range of the first axis, packed as MLX does
    codes: Callable[[slice], Triple]  # the same with a byte for each code

    def reader(self, group_of: StoredArray | None = None) -> TensorReader:
        """Exact values, and codes where MLX has a format for them.

        Args:
            group_of: (in_dims,) the group of each input; None: groups are neighbours.
        """
        if group_of is not None:
            places = np.arange(self.info.shape[-1])
            stated = group_of.expect(["I32", "I64"], places.shape).view()
            if not np.array_equal(stated, places // self.group_size):
                return self._mixed(group_of)
        codes = None if self.info.lossless is None else self._packed
        return TensorReader(self.info, self.parts, self._values, codes)

    def _mixed(self, group_of: StoredArray) -> TensorReader:
        """The reader where inputs lie in groups of any order: values, but no format of MLX."""
        info = replace(
            self.info,
            stored=f"{self.info.stored} act-order",
            stored_bytes=self.info.stored_bytes + group_of.num_bytes,
            lossless=None,
        )

        def values(rows: slice) -> mx.array:
            codes, scales, biases = self._checked(self.codes(rows))
            groups = group_of.view().astype(np.int64)
            if groups.min() < 0 or groups.max() >= scales.shape[1]:
                raise group_of.fail(f"names a group that is not one of {scales.shape[1]}")
            numbers = codes.astype(np.float32)
            numbers *= scales[:, groups]
            numbers += biases[:, groups]
            return mx.array(numbers)

        return TensorReader(info, (*self.parts, group_of), values)

    def _values(self, rows: slice) -> mx.array:
        codes, scales, biases = self._checked(self.codes(rows))
        values = codes.reshape(*scales.shape, self.group_size).astype(np.float32)
        values *= scales[..., None]
        values += biases[..., None]
        return mx.array(values.reshape(codes.shape))

    def _packed(self, rows: slice) -> Packed:
        """Codes as they are; each scale is repeated where MLX's groups are smaller."""
        assert self.info.lossless is not None
        words, scales, biases = self._checked(self.words(rows))
        times = self.group_size // self.info.lossless.group_size
        if times > 1:
            scales, biases = (np.repeat(part, times, axis=-1) for part in (scales, biases))
        wide = [mx.array(np.ascontiguousarray(part)) for part in (scales, biases)]
        narrow = [part.astype(mx_dtype(self.info.scales_dtype)) for part in wide]
        pairs = zip(wide, narrow, strict=True)
        exact = all(bool(mx.array_equal(w, n.astype(mx.float32))) for w, n in pairs)
        return Packed(mx.array(words), *(narrow if exact else wide))

    def _checked(self, triple: Triple) -> Triple:
        """Raise CheckpointError where a scale or a zero point is not finite."""
        if not all(np.isfinite(part).all() for part in triple[1:]):
            raise CheckpointError(f"{self.info.name} has scales that are infinite or NaN.")
        return triple


def affine_matrix(
    path: str,
    shape: tuple[int, ...],
    parts: Sequence[StoredArray],
    words: Callable[[slice], Triple],
    form: MLXFormat,
    *,
    stored: str,
    scales: StoredArray,
    exact: bool,
) -> AffineMatrix:
    """The weight of the module at a path.

    Args:
        form: bits and group size, as the source has them.
        stored: kind of the source, for people.
        scales: of `parts`.
        exact: whether the dtype of the scales holds the biases, too.
    """
    exact = exact and scales.dtype != "F32"
    dtype = FLOATS[scales.dtype]
    if dtype == "bfloat16" and not exact:
        dtype = "float16"  # as many bytes, and an eighth of the error in -zero * scale
    info = SourceTensor(
        name=f"{path}.weight",
        shape=shape,
        dtype="float32",
        stored=f"{stored} g{form.group_size}",
        stored_bytes=sum(part.num_bytes for part in parts),
        lossless=affine_format(form.bits, form.group_size),
        scales_dtype=dtype,
    )

    def codes(rows: slice) -> Triple:
        packed, scales, biases = words(rows)
        return unpack(packed, form.bits, shape[-1]), scales, biases

    return AffineMatrix(info, parts, form.group_size, words, codes)


def scale_values(octets: Array, form: MLXFormat) -> Array:
    return to_float32(octets, "F8_E4M3" if form.mode == "nvfp4" else "F8_E8M0")


Octets = tuple[Array, Array]
"""Codes (n, ..., bytes) uint8 and the bytes of scales (n, ..., groups)."""


def float_reader(
    info: SourceTensor,
    parts: Sequence[StoredArray],
    form: MLXFormat,
    octets: Callable[[slice], Octets],
    rescaled: Callable[[Array], Array] = lambda scales: scales,
) -> TensorReader:
    """The reader of floats in groups.

    Args:
        info: values in this dtype; codes where it says that they are lossless.
        octets: of a range of the first axis.
        rescaled: scales (float32), multiplied by the factor that the source has for all of them.
    """

    def values(rows: slice) -> mx.array:
        codes, scales = octets(rows)
        steps = rescaled(scale_values(scales, form))
        numbers = E4M3[codes]
        if form.bits == 4:
            numbers = E2M1[np.stack([codes & 0xF, codes >> 4], axis=-1)]
        grouped = numbers.reshape(*steps.shape, -1)
        grouped *= steps[..., None]
        return mx.array(grouped.reshape(*steps.shape[:-1], -1)).astype(mx_dtype(info.dtype))

    def packed(rows: slice) -> Packed:
        codes, scales = map(np.ascontiguousarray, octets(rows))
        return Packed(mx.array(codes.view(np.uint32)), mx.array(scales), None)

    return TensorReader(info, parts, values, None if info.lossless is None else packed)
