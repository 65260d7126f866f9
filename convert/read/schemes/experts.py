"""Experts as transformers has them: all of a layer in one tensor, the gate beside the up part.

`experts.gate_up_proj` is (E, 2 inner, hidden), or (E, hidden, 2 inner) where inputs come before
outputs; `experts.down_proj` likewise. gpt-oss has gate and up in turns, `..._bias` (E, out), and as
mxfp4, in MLX's own order, `..._blocks` (E, out, in / 32, 16) and `..._scales` (E, out, in / 32).
The experts leave here as `gate_proj.weight`, `up_proj.weight` (E, inner, hidden) and
`down_proj.weight` (E, hidden, inner), with `.bias`, under the names of MLX's switch layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..codes import Octets, float_reader
from ..source import Leaves, SourceTensor, TensorReader
from ..stored import FLOATS, StoredArray, to_mlx
from .floats import MXFP4

_PIECES = {  # stored -> what it becomes, which of how many parts
    "gate_up_proj": (("gate_proj", (0, 2)), ("up_proj", (1, 2))),
    "down_proj": (("down_proj", (0, 1)),),
}


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Claims the stacks of each layer."""

    switch: str  # what `experts` is called in MLX's layout of the architecture
    # (hidden, inner) of an expert: say whether stacks are (E, in, out) or (E, out, in), which
    # versions of transformers write differently
    sizes: tuple[int, int] = (0, 0)
    inputs_first: bool = False  # whether they are (E, in, out) where the sizes leave both open
    interleaved: bool = False  # rows of gate and up take turns; else the one lies behind the other

    def __call__(self, path: str, leaves: Leaves) -> Iterator[TensorReader]:
        layer, _, last = path.rpartition(".")
        if last != "experts":
            return
        for stored, pieces in _PIECES.items():
            array = leaves.get(stored)
            plain = leaves.pop(stored) if array is not None and array.dtype in FLOATS else None
            blocks, scales, bias = (
                leaves.pop(f"{stored}_{kind}", None) if self.interleaved else None
                for kind in ("blocks", "scales", "bias")
            )
            for piece, part in pieces:
                name = f"{layer}.{self.switch}.{piece}"
                if blocks is not None and scales is not None:
                    yield _mxfp4(f"{name}.weight", blocks, scales, part)
                if plain is not None:
                    turned = self._inputs_first(stored, plain)
                    yield self._stack(f"{name}.weight", plain, part, turned)
                if bias is not None:
                    yield _bias(f"{name}.bias", bias, part)

    def _inputs_first(self, stored: str, array: StoredArray) -> bool:
        hidden, inner = self.sizes
        shape = (hidden, inner) if stored == "down_proj" else (2 * inner, hidden)
        if array.shape[1:] in (shape, shape[::-1]) and shape != shape[::-1]:
            return array.shape[1:] != shape
        return self.inputs_first

    def _stack(
        self, name: str, stored: StoredArray, part: tuple[int, int], inputs_first: bool
    ) -> TensorReader:
        """Some outputs of every expert of a stack, (E, out, in)."""
        order = "(experts, in, out)" if inputs_first else "(experts, out, in)"
        if len(stored.shape) != 3 or 0 in stored.shape:
            raise stored.fail(f"has shape {stored.shape}; expected {order}")
        count, out_dims, in_dims = stored.shape
        if inputs_first:
            out_dims, in_dims = in_dims, out_dims
        part_rows = _rows(stored, out_dims, part, interleaved=self.interleaved)

        def values(rows: slice) -> mx.array:
            numbers = stored.view(rows)
            if inputs_first:
                numbers = numbers.swapaxes(1, 2)
            return to_mlx(numbers[:, part_rows], stored.dtype)

        return _plain(name, (count, out_dims // part[1], in_dims), stored, part, values)


GPT_OSS = StackedExperts("experts", inputs_first=True, interleaved=True)


def _plain(
    name: str,
    shape: tuple[int, ...],
    stored: StoredArray,
    part: tuple[int, int],
    values: Callable[[slice], mx.array],
) -> TensorReader:
    dtype, size = FLOATS[stored.dtype], stored.num_bytes // part[1]
    return TensorReader(
        SourceTensor(name, shape, dtype, stored.dtype.lower(), size), (stored,), values
    )


def _rows(
    array: StoredArray, length: int, part: tuple[int, int], *, interleaved: bool = True
) -> slice:
    number, parts = part
    if length % parts or length == 0:
        raise array.fail(f"has shape {array.shape}; expected gate and up side by side")
    height = length // parts
    return (
        slice(number, None, parts) if interleaved else slice(number * height, (number + 1) * height)
    )


def _mxfp4(
    name: str, blocks: StoredArray, scales: StoredArray, part: tuple[int, int]
) -> TensorReader:
    """mxfp4, every value of it exact in bfloat16."""
    if len(blocks.expect(["U8"]).shape) != 4 or blocks.shape[3] != 16 or 0 in blocks.shape:
        raise blocks.fail(f"has shape {blocks.shape}; expected (experts, out, in / 32, 16)")
    scales.expect(["U8"], blocks.shape[:3])
    count, out_dims, groups, _ = blocks.shape
    part_rows = _rows(blocks, out_dims, part)

    def octets(rows: slice) -> Octets:
        codes, powers = (np.ascontiguousarray(p.view(rows)[:, part_rows]) for p in (blocks, scales))
        return codes.reshape(*codes.shape[:2], -1), powers

    shape = (count, out_dims // part[1], groups * 32)
    size = shape[0] * shape[1] * groups * 17
    info = SourceTensor(name, shape, "bfloat16", "mxfp4 g32", size, lossless=MXFP4)
    return float_reader(info, (blocks, scales), MXFP4, octets)


def _bias(name: str, bias: StoredArray, part: tuple[int, int]) -> TensorReader:
    """(E, out)."""
    if len(bias.expect([*FLOATS]).shape) != 2 or 0 in bias.shape:
        raise bias.fail(f"has shape {bias.shape}; expected (experts, out)")
    count, both = bias.shape
    part_rows = _rows(bias, both, part)

    def values(rows: slice) -> mx.array:
        return to_mlx(bias.view(rows)[:, part_rows], bias.dtype)

    return _plain(name, (count, both // part[1]), bias, part, values)
