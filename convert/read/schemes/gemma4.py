"""Gemma 4 experts as the hub has them: all of a layer in one tensor, the gate above up.

`experts.gate_up_proj` (E, 2 inner, hidden) and `experts.down_proj` (E, hidden, inner) leave here as
`experts.switch_glu.gate_proj.weight` (E, inner, hidden) and so on, as MLX checkpoints have them.
"""

from collections.abc import Iterator

import mlx.core as mx

from ..base import Leaves, Reader, not_packed
from ..source import Packed, TensorInfo
from ..stored import FLOATS, StoredArray, to_mlx


def gemma4_experts(path: str, leaves: Leaves) -> Iterator[Reader]:
    """gate_proj, up_proj and down_proj of the experts at a path."""
    if path.rpartition(".")[2] != "experts":
        return
    both, down = leaves.pop("gate_up_proj", None), leaves.pop("down_proj", None)
    stack = f"{path}.switch_glu"
    if both is not None:
        if len(both.shape) != 3 or both.shape[1] % 2:
            raise both.fail(f"has shape {both.shape}; expected gate and up one above the other")
        inner = both.shape[1] // 2
        yield _Rows(f"{stack}.gate_proj.weight", both, slice(0, inner))
        yield _Rows(f"{stack}.up_proj.weight", both, slice(inner, 2 * inner))
    if down is not None:
        yield _Rows(f"{stack}.down_proj.weight", down, slice(0, down.shape[1]))


class _Rows:
    """Some rows of every expert."""

    def __init__(self, name: str, stored: StoredArray, rows: slice) -> None:
        if len(stored.expect([*FLOATS]).shape) != 3 or 0 in stored.shape:
            raise stored.fail(f"has shape {stored.shape}; expected (experts, out, in)")
        count, out_dims, in_dims = stored.shape
        self._rows = rows
        self.parts = (stored,)
        height = rows.stop - rows.start
        self.info = TensorInfo(
            name=name,
            shape=(count, height, in_dims),
            dtype=FLOATS[stored.dtype],
            stored=stored.dtype.lower(),
            stored_bytes=stored.num_bytes * height // out_dims,
        )

    def read(self, rows: slice) -> mx.array:
        """Experts in a range."""
        (stored,) = self.parts
        return to_mlx(stored.view(rows)[:, self._rows], stored.dtype)

    def packed(self) -> Packed:
        """There are no codes."""
        raise not_packed(self.info)
