"""gpt-oss experts as the hub has them: all of a layer in one tensor, gate and up interleaved.

`experts.gate_up_proj_blocks` (E, 2 inner, hidden / 32, 16) uint8 and `_scales` (E, 2 inner,
hidden / 32) are mxfp4 in MLX's own order; `experts.gate_up_proj` (E, hidden, 2 inner) is dense and
transposed. Even rows are the gate, odd ones up. They leave here as `experts.gate_proj.weight`
(E, inner, hidden) and so on, with `.bias`, as source.py says.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..base import Leaves, Reader, not_packed
from ..source import Packed, TensorInfo
from ..stored import FLOATS, StoredArray, to_float32, to_mlx
from .fp4 import MXFP4, fp4_values
from .stacks import StackPart

_PIECES = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}


def gpt_oss_experts(path: str, leaves: Leaves) -> Iterator[Reader]:
    """gate_proj, up_proj and down_proj of the experts at a path."""
    if path.rpartition(".")[2] != "experts":
        return
    for stored, pieces in _PIECES.items():
        blocks, scales = leaves.pop(f"{stored}_blocks", None), leaves.pop(f"{stored}_scales", None)
        dense, bias = leaves.pop(stored, None), leaves.pop(f"{stored}_bias", None)
        for piece, rows in pieces:
            name = f"{path}.{piece}"
            if blocks is not None and scales is not None:
                yield _Blocks(name, blocks, scales, rows)
            if dense is not None:
                part = (rows.start or 0, rows.step or 1)
                yield StackPart(f"{name}.weight", dense, part, inputs_first=True, interleaved=True)
            if bias is not None:
                yield _Bias(name, bias, rows)


def _rows(array: StoredArray, length: int, rows: slice) -> int:
    if length % (rows.step or 1) or length == 0:
        raise array.fail(f"has shape {array.shape}; expected gate and up side by side")
    return len(range(length)[rows])


class _Blocks:
    """mxfp4, every value of it exact in bfloat16."""

    def __init__(self, name: str, blocks: StoredArray, scales: StoredArray, rows: slice) -> None:
        if len(blocks.expect(["U8"]).shape) != 4 or blocks.shape[3] != 16 or 0 in blocks.shape:
            raise blocks.fail(f"has shape {blocks.shape}; expected (experts, out, in / 32, 16)")
        scales.expect(["U8"], blocks.shape[:3])
        count, out_dims, groups, _ = blocks.shape
        self._rows = rows
        self.parts = (blocks, scales)
        out_dims = _rows(blocks, out_dims, rows)
        self.info = TensorInfo(
            name=f"{name}.weight",
            shape=(count, out_dims, groups * 32),
            dtype="bfloat16",
            stored="mxfp4 g32",
            stored_bytes=count * out_dims * groups * 17,
            lossless=MXFP4,
        )

    def read(self, rows: slice) -> mx.array:
        """Experts in a range."""
        blocks, scales = (np.ascontiguousarray(p.view(rows)[:, self._rows]) for p in self.parts)
        octets = blocks.reshape(*blocks.shape[:2], -1)
        return mx.array(fp4_values(octets, to_float32(scales, "F8_E8M0"))).astype(mx.bfloat16)

    def packed(self) -> Packed:
        """Codes and exponents as they are."""
        blocks, scales = (np.ascontiguousarray(part.view()[:, self._rows]) for part in self.parts)
        words = blocks.reshape(*blocks.shape[:2], -1).view(np.uint32)
        return Packed(mx.array(words), mx.array(scales), None)


class _Bias:
    """(E, out)."""

    def __init__(self, name: str, bias: StoredArray, rows: slice) -> None:
        if len(bias.expect([*FLOATS]).shape) != 2 or 0 in bias.shape:
            raise bias.fail(f"has shape {bias.shape}; expected (experts, out)")
        count, both = bias.shape
        out_dims = _rows(bias, both, rows)
        self._rows = rows
        self.parts = (bias,)
        num_bytes = bias.num_bytes * out_dims // both
        dtype, stored = FLOATS[bias.dtype], bias.dtype.lower()
        self.info = TensorInfo(f"{name}.bias", (count, out_dims), dtype, stored, num_bytes)

    def read(self, rows: slice) -> mx.array:
        """Experts in a range."""
        (bias,) = self.parts
        return to_mlx(bias.view(rows)[:, self._rows], bias.dtype)

    def packed(self) -> Packed:
        """There are no codes."""
        raise not_packed(self.info)
