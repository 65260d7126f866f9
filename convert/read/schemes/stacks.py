"""Experts as transformers 5 has them: all of a layer in one tensor, the gate beside the up part.

`experts.gate_up_proj` is (E, 2 inner, hidden), or (E, hidden, 2 inner) where inputs come before
outputs (Llama 4, Qwen 3 VL); `experts.down_proj` likewise. They leave here as `gate_proj.weight`,
`up_proj.weight` (E, inner, hidden) and `down_proj.weight` (E, hidden, inner), under the names of
MLX's switch layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from ..base import Leaves, Reader, not_packed
from ..source import Packed, TensorInfo
from ..stored import FLOATS, StoredArray, to_mlx


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Claims the stacks of each layer.

    Args:
        switch: what `experts` is called in MLX's layout of the architecture.
        inputs_first: stacks are (E, in, out).
    """

    switch: str
    inputs_first: bool = False

    def __call__(self, path: str, leaves: Leaves) -> Iterator[Reader]:
        """gate_proj, up_proj and down_proj of the experts at a path."""
        layer, _, last = path.rpartition(".")
        if last != "experts":
            return
        plain = [leaf for leaf, array in leaves.items() if array.dtype in FLOATS]
        both, down = (
            leaves.pop(leaf) if leaf in plain else None for leaf in ("gate_up_proj", "down_proj")
        )
        stack = f"{layer}.{self.switch}"
        if both is not None:
            for name, part in (("gate_proj", 0), ("up_proj", 1)):
                yield StackPart(f"{stack}.{name}.weight", both, (part, 2), self.inputs_first)
        if down is not None:
            yield StackPart(f"{stack}.down_proj.weight", down, (0, 1), self.inputs_first)


class StackPart:
    """Some outputs of every expert of a stack, (E, out, in).

    Args:
        name: of what it becomes.
        stored: the stack.
        part: which of how many parts of equal size.
        inputs_first: the stack is (E, in, out).
        interleaved: parts take turns; else they lie one behind the other.
    """

    def __init__(
        self,
        name: str,
        stored: StoredArray,
        part: tuple[int, int],
        inputs_first: bool,
        *,
        interleaved: bool = False,
    ) -> None:
        order = "(experts, in, out)" if inputs_first else "(experts, out, in)"
        if len(stored.expect([*FLOATS]).shape) != 3 or 0 in stored.shape:
            raise stored.fail(f"has shape {stored.shape}; expected {order}")
        number, parts = part
        count, out_dims, in_dims = stored.shape
        if inputs_first:
            out_dims, in_dims = in_dims, out_dims
        if out_dims % parts:
            raise stored.fail(f"has shape {stored.shape}; expected {order}, gate and up in one")
        height = out_dims // parts
        first, step = (number, parts) if interleaved else (number * height, 1)
        self._rows = slice(first, first + (height - 1) * step + 1, step)
        self._inputs_first = inputs_first
        self.parts = (stored,)
        self.info = TensorInfo(
            name=name,
            shape=(count, height, in_dims),
            dtype=FLOATS[stored.dtype],
            stored=stored.dtype.lower(),
            stored_bytes=stored.num_bytes // parts,
        )

    def read(self, rows: slice) -> mx.array:
        """Experts in a range."""
        (stored,) = self.parts
        values = stored.view(rows)
        if self._inputs_first:
            values = values.swapaxes(1, 2)
        return to_mlx(values[:, self._rows], stored.dtype)

    def packed(self) -> Packed:
        """There are no codes."""
        raise not_packed(self.info)
