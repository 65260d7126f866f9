"""Reads the matrices of a layer's experts, in any layout of a checkpoint."""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from ..layers.moe import ExpertProjection
from .language import arrays
from .weights.matrix import StoredMatrix, fused_experts
from .weights.weights import Weights

# Ends of the names of experts' stacks on the hub, where they are no modules of their own.
PACKED = (".experts.gate_up_proj", ".experts.down_proj")
_PACKED_NAMES = ("gate_up_proj", "down_proj", "0.gate_up_proj")
Shape = tuple[int, int, int]  # experts, outputs, inputs


class PackedExperts:
    """The hub's layout: gate and up are one matrix, the gate first; one tensor, or one an expert.

    Attributes:
        outputs_first: stacks have outputs before inputs, as they are computed.
    """

    outputs_first: ClassVar[bool] = True

    def half(self, which: int, total: int) -> slice:
        """The rows of gate (0) or up (1) among `total` of both."""
        return slice(which * total // 2, (which + 1) * total // 2)

    def matrix(
        self, weights: Weights, path: str, name: str, shape: Shape, parts: Sequence[int] | None
    ) -> StoredMatrix:
        """The matrices `name` of the experts at `path`; `parts`: see `Weights.linear`."""
        return weights.experts(f"{path}.{name}", f"{path}.{{}}.{name}", shape, parts=parts)


class TransposedExperts(PackedExperts):
    """Stacks have inputs before outputs. Conversions to MLX have them as they are computed."""

    outputs_first = False

    def matrix(
        self, weights: Weights, path: str, name: str, shape: Shape, parts: Sequence[int] | None
    ) -> StoredMatrix:
        tensor, (count, out_dims, in_dims) = f"{path}.{name}.weight", shape
        if out_dims != in_dims and weights.has_shape(tensor, shape):
            return super().matrix(weights, path, name, shape, parts)
        weight = weights.take(tensor, (count, in_dims, out_dims), parts=parts)
        stored = StoredMatrix(mx.contiguous(weight.swapaxes(1, 2)))
        return weights.named(stored, f"{path}.{name}", tensor, outputs_axis=-1)


class AlternatingExperts(PackedExperts):
    """Rows of gate and up alternate, in stacks and in adapters."""

    def half(self, which: int, total: int) -> slice:
        return slice(which, total, 2)


def read_experts(
    weights: Weights, path: str, layout: PackedExperts, shape: Shape
) -> tuple[ExpertProjection, ExpertProjection]:
    """Gate beside up, and down, of the experts at `path`; `shape`: of the latter.

    They are the stacks `switch_mlp.gate_proj` and so on, as in MLX checkpoints, or
    `experts.0.gate_proj` and so on, or `experts.gate_up_proj` and `experts.down_proj` in `layout`.
    """
    count, hidden, inner = shape
    apart = f"{path}.experts.gate_proj.weight" in weights  # as MLX stacks, under another name
    packed = not apart and any(f"{path}.experts.{n}.weight" in weights for n in _PACKED_NAMES)
    if packed:
        both, at = (count, 2 * inner, hidden), f"{path}.experts"
        parts = [layout.matrix(weights, at, "gate_up_proj", both, [inner, inner])]
    else:
        parts = [_stacked(weights, path, kind, (count, inner, hidden)) for kind in ("gate", "up")]
    # Gate and up are fused before down is read: memory does not hold the parts of both.
    gate_up = fused_experts(parts)
    del parts
    weights.evaluate(list(arrays(gate_up)))
    if packed:
        down = layout.matrix(weights, f"{path}.experts", "down_proj", shape, None)
    else:
        down = _stacked(weights, path, "down", shape)
    return gate_up, down.expert_projection()


def _stacked(weights: Weights, path: str, kind: str, shape: Shape) -> StoredMatrix:
    single = f"{path}.experts.{{}}.{kind}_proj"
    name = f"{path}.experts.{kind}_proj"
    if f"{name}.weight" not in weights:
        name = f"{path}.switch_mlp.{kind}_proj"
    return weights.experts(name, single, shape)
