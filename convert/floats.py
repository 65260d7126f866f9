"""Codes of the floating-point formats: mxfp4, mxfp8 and nvfp4.

Elements are E2M1 or E4M3, scales powers of two (E8M0) or E4M3: OCP Microscaling Formats 1.0, and
NVIDIA's NVFP4 without its second, per-tensor scale. A group's scale is the neighbour of the usual
one (largest magnitude over the largest element) that leaves the least squared error.
"""

import numpy as np
from numpy.typing import NDArray

from .arrays import Codes, Floats
from .read import MLXFormat
from .read.codes import scale_values
from .read.stored import E2M1 as ALL_E2M1
from .read.stored import E4M3 as ALL_E4M3

LARGEST = {4: np.float32(6.0), 8: np.float32(448.0)}
E2M1, E4M3 = ALL_E2M1[:8], ALL_E4M3[:127]  # from 0 on; codes of negative ones follow, and NaN
E2M1_EDGES = (E2M1[1:] + E2M1[:-1]) / 2
NEIGHBOURS = (0, -1, 1)
SHARES = tuple(np.float32(share) for share in (1.0, 0.92, 0.84, 0.76, 1.08, 1.5))
E4M3_EDGES = (E4M3[1:] + E4M3[:-1]) / 2


def search(
    groups: Floats, form: MLXFormat, importance: Floats | None, *, usual_only: bool = False
) -> NDArray[np.uint8]:
    """The scale of each group as its byte, (R, G, 1), for groups (R, G, group_size)."""
    largest: Floats = np.abs(groups).max(axis=-1, keepdims=True)
    best, *others = _choices(largest / LARGEST[form.bits], form)
    if usual_only:
        return best
    best_error = _error_of(groups, best, form, importance)
    for byte in others:
        error = _error_of(groups, byte, form, importance)
        better = error < best_error
        np.copyto(best, byte, where=better)
        np.copyto(best_error, error, where=better)
    return best


def _error_of(
    groups: Floats, byte: NDArray[np.uint8], form: MLXFormat, importance: Floats | None
) -> Floats:
    errors = decode(encode(groups, byte, form), byte, form) - groups
    weighted = errors if importance is None else errors * importance
    return np.einsum("rgk,rgk->rg", weighted, errors)[..., None]


def encode(groups: Floats, byte: NDArray[np.uint8], form: MLXFormat) -> Codes:
    """The nearest element of each number, sign in the highest bit."""
    return _nearest(groups / step_of(byte, form), form)


def step_of(byte: NDArray[np.uint8], form: MLXFormat) -> Floats:
    """The scale; 1 where it is 0, and every element stands for 0."""
    scale = scale_values(byte, form)
    return np.where(scale > 0, scale, np.float32(1))


def nearest(ratio: Floats, form: MLXFormat) -> tuple[Codes, Floats]:
    """The nearest element of each ratio of a number to its scale, and its value."""
    codes = _nearest(ratio, form)
    table: Floats = ALL_E2M1 if form.bits == 4 else ALL_E4M3
    return codes, table[codes]


def _nearest(ratio: Floats, form: MLXFormat) -> Codes:
    edges = E2M1_EDGES if form.bits == 4 else E4M3_EDGES
    codes = np.searchsorted(edges, np.abs(ratio)).astype(np.uint8)
    codes |= np.signbit(ratio).astype(np.uint8) << np.uint8(form.bits - 1)
    return codes


def decode(codes: Codes, byte: NDArray[np.uint8], form: MLXFormat) -> Floats:
    table: Floats = ALL_E2M1 if form.bits == 4 else ALL_E4M3
    return table[codes] * scale_values(byte, form)


def _choices(largest: Floats, form: MLXFormat) -> list[NDArray[np.uint8]]:
    """Bytes of scales to try, the usual one first."""
    if form.mode == "nvfp4":
        return [np.searchsorted(E4M3_EDGES, largest * share).astype(np.uint8) for share in SHARES]
    exponent = np.ceil(np.log2(np.maximum(largest, np.float32(2.0**-127))))
    offsets = NEIGHBOURS if form.bits == 4 else (0,)  # E4M3 is as precise at any scale
    return [np.clip(exponent + offset + 127, 0, 254).astype(np.uint8) for offset in offsets]
