"""A gated short convolution as a mixer (LFM2): each number sees its own last few tokens."""

import mlx.core as mx

from ..core import StateSpec
from ..metal_kernels.conv_step import ConvForm, conv_step
from .causal_conv import CausalConv
from .linear import Projection
from .recurrent import RecurrentMixer
from .step import Arrays, StatesBefore, Step


class ShortConv(RecurrentMixer):
    """out(c * conv(b * x)), where b, c and x are projections of the input.

    On a GPU a few tokens go through `conv_step`, gates and all.

    Args:
        in_proj: (T, hidden) -> (T, 3 * hidden): b, c and x.
        out_proj: (T, hidden) -> (T, hidden).
        conv: over the hidden size.
        spec: of one state, the convolution's.
    """

    __slots__ = ("conv", "conv_form", "in_proj", "out_proj")

    def __init__(
        self, *, in_proj: Projection, out_proj: Projection, conv: CausalConv, spec: StateSpec
    ) -> None:
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.conv = conv
        dtype, biased = conv.weight.dtype, conv.bias is not None
        self.conv_form = ConvForm(conv.channels, conv.length, 0, True, biased, dtype, dtype)
        super().__init__(spec, [self.conv_form])

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> what is projected out, (T, hidden)."""
        return self.recur([self.in_proj(x)], step.caches[self])

    def in_kernels(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """As of `RecurrentMixer`; inputs as of `in_mlx`."""
        plan, (carried,) = before.lying()
        y, seen = conv_step(
            inputs[0], self.conv.weight, self.conv.bias, carried, plan, self.conv_form
        )
        return y, [seen]

    def in_mlx(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """As of `RecurrentMixer`; inputs: b, c and x side by side, (B, L, 3 * hidden)."""
        gate, after, values = mx.split(inputs[0], 3, axis=-1)
        gated, (state,) = gate * values, before.read()
        y = after * self.conv(gated, state)
        return y, [self.conv.after(gated, state, before.lengths)]

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.out_proj(self.mix(x, step), residual)
