"""Four-bit floats (E2M1) with scales for 16 or 32 inputs, one by one.

Codes lie two to a byte, the first in the low half, which is MLX's order too.
compressed-tensors: weight_packed, weight_scale, and for nvfp4 weight_global_scale, which divides.
ModelOpt: weight, weight_scale, and weight_scale_2, which multiplies. MLX's nvfp4 has no such
third scale, so where there is one, there are only values.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..base import Leaves, Reader, not_packed
from ..source import MLXFormat, Packed, TensorInfo
from ..stored import E2M1, Array, StoredArray, to_float32

NVFP4 = MLXFormat(16, 4, "nvfp4")
MXFP4 = MLXFormat(32, 4, "mxfp4")


def fp4_modules(path: str, leaves: Leaves) -> Iterator[Reader]:
    """The matrix of a module with codes in bytes and scales of eight bits."""
    name = "weight_packed" if "weight_packed" in leaves else "weight"
    codes, scale = leaves.get(name), leaves.get("weight_scale")
    if codes is None or scale is None or codes.dtype != "U8":
        return
    del leaves[name], leaves["weight_scale"]
    divisor, factor = (leaves.pop(n, None) for n in ("weight_global_scale", "weight_scale_2"))
    yield _Matrix(path, codes, scale, divisor or factor, divides=divisor is not None)


class _Matrix:
    def __init__(
        self,
        path: str,
        codes: StoredArray,
        scale: StoredArray,
        third: StoredArray | None,
        *,
        divides: bool,
    ) -> None:
        if len(codes.shape) != 2 or 0 in codes.shape:
            raise codes.fail(f"has shape {codes.shape}; expected (out, in / 2)")
        form = NVFP4 if scale.expect(["F8_E4M3", "F8_E8M0", "U8"]).dtype == "F8_E4M3" else MXFP4
        out_dims, in_dims = codes.shape[0], codes.shape[1] * 2
        if in_dims % 32:
            raise codes.fail(f"has {in_dims} inputs, which 32 does not divide")
        scale.expect([scale.dtype], (out_dims, in_dims // form.group_size))
        if third is not None and (third.expect(["F32"]).shape not in ((), (1,))):
            raise third.fail(f"has shape {third.shape}; expected one number")
        self.parts = (codes, scale, third) if third else (codes, scale)
        self._third, self._divides = third, divides
        self.info = TensorInfo(
            name=f"{path}.weight",
            shape=(out_dims, in_dims),
            dtype="float32" if third else "bfloat16",
            stored=f"{form.mode} g{form.group_size}" + (" with a global scale" if third else ""),
            stored_bytes=sum(part.num_bytes for part in self.parts),
            lossless=None if third else form,
        )

    def read(self, rows: slice) -> mx.array:
        """Code times scale times the third scale."""
        codes, scale = self.parts[:2]
        kind = "F8_E4M3" if scale.dtype == "F8_E4M3" else "F8_E8M0"
        steps = to_float32(scale.view(rows), kind)
        if self._third is not None:
            third = np.float32(np.asarray(self._third.view()).reshape(()))
            steps = steps / third if self._divides else steps * third
        values = mx.array(fp4_values(codes.view(rows), steps))
        return values if self._third is not None else values.astype(mx.bfloat16)

    def packed(self) -> Packed:
        """Codes and scales as they are."""
        if self.info.lossless is None:
            raise not_packed(self.info)
        codes, scale = self.parts[:2]
        return Packed(
            mx.array(np.ascontiguousarray(codes.view()).view(np.uint32)),
            mx.array(np.ascontiguousarray(scale.view())),
            None,
        )


def fp4_values(octets: Array, scales: Array) -> Array:
    """(..., in / 2) uint8 and (..., groups) float32 -> (..., in) float32."""
    values = np.empty((*octets.shape, 2), np.float32)
    values[..., 0] = E2M1[octets & 0xF]
    values[..., 1] = E2M1[octets >> 4]
    grouped = values.reshape(*scales.shape, -1)
    grouped *= scales[..., None]
    return grouped.reshape(*octets.shape[:-1], -1)
