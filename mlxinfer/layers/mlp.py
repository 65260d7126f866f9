"""The dense gated feed-forward block. Knows no experts (moe.py) and no norms."""

import mlx.core as mx

from .activations import Gated
from .linear import Projection


class MLP:
    """down(act(gate(x)) * up(x)), with gate and up fused into one matrix."""

    __slots__ = ("activation", "down_proj", "gate_up_proj")

    def __init__(self, gate_up_proj: Projection, down_proj: Projection, activation: Gated) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """residual (T, hidden) + self(x)."""
        return self.down_proj.onto(residual, self.activation(self.gate_up_proj(x)))
