"""A gated short convolution as a mixer (LFM2): each number sees its own last few tokens."""

import mlx.core as mx

from ..core import StateSpec
from .linear import Projection
from .step import Arrays, Step


class ShortConv:
    """out(c * conv(b * x)), where b, c and x are projections of the input.

    The state of a sequence is what the convolution still sees of it: its last inputs, one fewer
    than the convolution is long.

    Args:
        in_proj: (T, hidden) -> (T, 3 * hidden): b, c and x.
        out_proj: (T, hidden) -> (T, hidden).
        weight: (length, hidden), the oldest token's first.
        bias: (hidden,); None: there is none.
        spec: of one state (length - 1, hidden).
    """

    __slots__ = ("bias", "in_proj", "length", "out_proj", "spec", "weight")

    def __init__(
        self,
        *,
        in_proj: Projection,
        out_proj: Projection,
        weight: mx.array,
        bias: mx.array | None,
        spec: StateSpec,
    ) -> None:
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.weight = weight
        self.bias = bias
        self.spec = spec
        self.length = weight.shape[0]

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> what is projected out, (T, hidden)."""
        before, after, values = mx.split(self.in_proj(x), 3, axis=-1)
        gated, outputs = before * values, []
        for part in step.cache.parts:
            inputs = part.take(gated)  # (B, L, hidden)
            states = part.read()
            outputs.append(self._convolve(self._seen(inputs, states)))
            part.write(self.replay([inputs], states, part.lengths), [inputs], self.replay)
        joined: mx.array = step.cache.join(outputs)
        return after * joined

    def replay(self, inputs: Arrays, states: Arrays, lengths: mx.array | None) -> Arrays:
        """The last inputs (B, length - 1, hidden) after the first `lengths` (B,) tokens."""
        seen = self._seen(inputs[0], states)
        if lengths is None:
            return [seen[:, inputs[0].shape[1] :]]
        places = lengths[:, None] + mx.arange(self.length - 1)  # (B, length - 1)
        return [mx.take_along_axis(seen, places[..., None], axis=1)]

    def _seen(self, inputs: mx.array, states: Arrays) -> mx.array:
        """(B, length - 1 + L, hidden): the state, then the inputs."""
        return mx.concatenate([states[0].astype(inputs.dtype), inputs], axis=1)

    def _convolve(self, seen: mx.array) -> mx.array:
        """(B, length - 1 + L, hidden) -> (B, L, hidden)."""
        count = seen.shape[1] - self.length + 1
        terms = [seen[:, i : i + count] * self.weight[i] for i in range(self.length)]
        y = sum(terms[1:], terms[0])
        return y if self.bias is None else y + self.bias

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        return self.out_proj(self.mix(x, step))

    def onto(self, residual: mx.array, x: mx.array, step: Step) -> mx.array:
        """residual (T, hidden) + self(x, step)."""
        return self.out_proj.onto(residual, self.mix(x, step))
