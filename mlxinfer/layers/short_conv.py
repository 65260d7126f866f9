"""A gated short convolution as a mixer (LFM2): each number sees its own last few tokens."""

import mlx.core as mx

from ..core import StateSpec
from .causal_conv import CausalConv
from .linear import Projection
from .step import Arrays, Step


class ShortConv:
    """out(c * conv(b * x)), where b, c and x are projections of the input.

    Args:
        in_proj: (T, hidden) -> (T, 3 * hidden): b, c and x.
        out_proj: (T, hidden) -> (T, hidden).
        conv: over the hidden size.
        spec: of one state, the convolution's.
    """

    __slots__ = ("conv", "in_proj", "out_proj", "spec")

    def __init__(
        self, *, in_proj: Projection, out_proj: Projection, conv: CausalConv, spec: StateSpec
    ) -> None:
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.conv = conv
        self.spec = spec

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> what is projected out, (T, hidden)."""
        before, after, values = mx.split(self.in_proj(x), 3, axis=-1)
        gated, outputs = before * values, []
        for part in step.caches[self].parts:
            inputs, states = [part.take(gated)], part.read()  # (B, L, hidden)
            outputs.append(self.conv(inputs[0], states[0]))
            part.write(self.replay(inputs, states, part.lengths), inputs, self.replay)
        joined: mx.array = step.caches[self].join(outputs)
        return after * joined

    def replay(self, inputs: Arrays, states: Arrays, lengths: mx.array | None) -> Arrays:
        """The state after the first `lengths` (B,) tokens."""
        return [self.conv.after(inputs[0], states[0], lengths)]

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.out_proj(self.mix(x, step), residual)
