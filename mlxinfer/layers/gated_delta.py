"""Gated DeltaNet as a mixer (arXiv 2412.06464): linear attention with decay and the delta rule.

B = sequences of a part, L = tokens of each, T = tokens of the step, Hk = key heads, Hv = value
heads (a multiple of Hk: each key head serves Hv / Hk neighbours), Dk and Dv = numbers of a key and
of a value.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..cache_specs import StateSpec
from ..metal_kernels.delta_step import DeltaStep
from .linear import Projection
from .norm import Norm
from .recurrent import CausalConv, RecurrentMixer, Run
from .step import Arrays, Step


class GatedDeltaNet(RecurrentMixer):
    """One matrix per head that maps keys to values; each token decays it and corrects a part.

    See `DeltaStep`.

    Args:
        in_proj: (T, hidden) -> queries, keys and values (Hk Dk, Hk Dk, Hv Dv), output gates
            (Hv Dv), strengths and time steps (Hv each), side by side.
        out_proj: (T, Hv * Dv) -> (T, hidden).
        norm: over the Dv numbers of each head's output.
        log_rate: (Hv,) float32; decay is exp(-exp(log_rate) * softplus(time step + step_bias)).
        step_bias: (Hv,) float32.
        spec: of two states, the convolution's and (Hv, Dv, Dk).
        bound: of the logarithm of a decay, see `DeltaStep`; 0: there is none.
        strongest: the limit of strengths, see `DeltaStep`.
        sigmoid_gates: outputs are multiplied by the sigmoid of their gates; else by its silu.
    """

    __slots__ = ("conv", "gates", "norm", "rate", "sigmoid_gates", "step_bias", "value_heads")

    def __init__(
        self,
        *,
        in_proj: Projection,
        out_proj: Projection,
        conv: CausalConv,
        norm: Norm,
        log_rate: mx.array,
        step_bias: mx.array,
        spec: StateSpec,
        bound: float = 0.0,
        strongest: float = 1.0,
        sigmoid_gates: bool = False,
    ) -> None:
        heads, value_dim, key_dim = spec.shapes[1][0]
        channels, inner = conv.weight.shape[0], heads * value_dim
        per_channel = len(log_rate) > heads  # `KimiDelta`, with gates and time steps of its own
        strengths_at = channels if per_channel else channels + inner
        delta = DeltaStep(
            key_heads=(channels - inner) // (2 * key_dim),
            key_dim=key_dim,
            value_heads=heads,
            value_dim=value_dim,
            per_channel=per_channel,
            strengths_at=strengths_at,
            times_at=0 if per_channel else strengths_at + heads,
            dtype=conv.weight.dtype,
            bound=bound,
            strongest=strongest,
        )
        steps = [conv.step(), delta]
        super().__init__(in_proj=in_proj, out_proj=out_proj, spec=spec, steps=steps)
        self.value_heads = (heads, value_dim)
        self.gates = slice(channels, channels + inner)  # output gates among the outputs of in_proj
        self.conv = conv
        self.norm = norm
        self.sigmoid_gates = sigmoid_gates
        self.rate = mx.exp(log_rate)
        self.step_bias = step_bias

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the input of out_proj, (T, Hv * Dv)."""
        projected = self.in_proj(x)
        gate = projected[:, self.gates]
        factor = mx.sigmoid(gate) if self.sigmoid_gates else gate * mx.sigmoid(gate)
        return self.normed([projected], step) * factor

    def normed(self, rows: Arrays, step: Step) -> mx.array:
        """The outputs of the recurrence for rows (T, ...), normalised, (T, Hv * Dv)."""
        y = self.recur(rows, step)
        return self.norm(mx.unflatten(y, -1, self.value_heads)).flatten(-2)

    def chain(self, inputs: Arrays, run: Run) -> tuple[mx.array, Arrays]:
        """See `RecurrentMixer`.

        Args:
            inputs: outputs of `in_proj` (B, L, ...); then time steps, if they are not among these.
        """
        mixed, seen = run(0, inputs[0], *self.conv)
        y, state = run(1, mixed, inputs[0], inputs[-1], self.rate, self.step_bias)
        return y, [seen, state]


class KimiDelta(GatedDeltaNet):
    """Kimi Delta Attention (arXiv 2510.26692): each number of a key decays by itself.

    Args:
        in_proj: (T, hidden) -> queries, keys and values (3 H D), and strengths (H), side by side.
        decay_projs: (T, hidden) -> time steps (T, H * D), one after the other: one projection, or
            two through few numbers.
        gate_projs: (T, hidden) -> output gates (T, H * D), in the same way.
        log_rate: (H,) float32.
        step_bias: (H * D,) float32.
        others: see `GatedDeltaNet`.
    """

    __slots__ = ("decay_projs", "gate_projs")

    def __init__(
        self,
        *,
        decay_projs: Sequence[Projection],
        gate_projs: Sequence[Projection],
        log_rate: mx.array,
        step_bias: mx.array,
        spec: StateSpec,
        **others: Any,
    ) -> None:
        rates = mx.repeat(log_rate, spec.shapes[1][0][2])  # (H * D,)
        super().__init__(log_rate=rates, step_bias=step_bias, spec=spec, **others)
        self.decay_projs = tuple(decay_projs)
        self.gate_projs = tuple(gate_projs)

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the input of out_proj, (T, H * D)."""
        times = gate = x
        for projection in self.decay_projs:
            times = projection(times)
        for projection in self.gate_projs:
            gate = projection(gate)
        return self.normed([self.in_proj(x), times], step) * mx.sigmoid(gate)
