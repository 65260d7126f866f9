"""A gated short convolution as a mixer (LFM2): each number sees its own last few tokens."""

import mlx.core as mx

from ..core import StateSpec
from .linear import Projection
from .recurrent import CausalConv, RecurrentMixer, Run
from .step import Arrays, Step


class ShortConv(RecurrentMixer):
    """out(c * conv(b * x)), where b, c and x are projections of the input.

    Args:
        in_proj: (T, hidden) -> (T, 3 * hidden): b, c and x.
        out_proj: (T, hidden) -> (T, hidden).
        conv: over the hidden size.
        spec: of one state, the convolution's.
    """

    __slots__ = ("conv",)

    def __init__(
        self, *, in_proj: Projection, out_proj: Projection, conv: CausalConv, spec: StateSpec
    ) -> None:
        self.conv = conv
        steps = [conv.step(gated=True)]
        super().__init__(in_proj=in_proj, out_proj=out_proj, spec=spec, steps=steps)

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the input of out_proj, (T, hidden)."""
        return self.recur([self.in_proj(x)], step.caches[self])

    def chain(self, inputs: Arrays, run: Run) -> tuple[mx.array, Arrays]:
        """See `RecurrentMixer`. Inputs: b, c and x side by side, (B, L, 3 * hidden)."""
        y, seen = run(0, inputs[0], *self.conv)
        return y, [seen]
