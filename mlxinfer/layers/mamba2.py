"""Mamba-2 as a mixer (arXiv 2405.21060): a state space with one decay a head and token.

B = sequences of a part, L = tokens of each, T = tokens of the step, H = heads in G groups of R, P =
numbers of a head, N = numbers of its state for each of them.
"""

import mlx.core as mx

from ..cache_specs import StateSpec
from ..metal_kernels.ssm_step import SSMStep
from .linear import Projection
from .norm import Norm
from .recurrent import CausalConv, RecurrentMixer, Run
from .step import Arrays, Step


class Mamba2(RecurrentMixer):
    """Heads with a state (P, N) that decays, and takes up the outer product of inputs x and keys b.

    With time step t and rate a, the state S becomes exp(-a t) S + t x b^T, and the head's output is
    S c + d x, where b and c are shared by the heads of a group.

    Args:
        in_proj: (T, hidden) -> gates (H P), x, b and c (H P, G N, G N), time steps (H).
        out_proj: (T, H * P) -> (T, hidden).
        norm: over (T, H * P), or (T, G, R * P) where there are several groups; None: no norm.
        gate_first: outputs are gated before the norm, else behind it.
        num_groups: G.
        log_rate, step_bias, skip: (H,) float32: log a, the bias of time steps, and d.
        step_limits: the smallest and the largest time step.
        spec: of two states, the convolution's and (H, P, N).
    """

    __slots__ = (
        "conv", "gate_first", "inner", "norm", "num_groups", "rate", "skip", "step_bias",
    )  # fmt: skip

    def __init__(
        self,
        *,
        in_proj: Projection,
        out_proj: Projection,
        conv: CausalConv,
        norm: Norm | None,
        gate_first: bool = True,
        num_groups: int,
        log_rate: mx.array,
        step_bias: mx.array,
        skip: mx.array,
        step_limits: tuple[float, float],
        spec: StateSpec,
    ) -> None:
        heads, head_dim, state_dim = spec.shapes[1][0]
        inner, dtype = heads * head_dim, conv.weight.dtype
        times_at = inner + conv.weight.shape[0]
        ssm = SSMStep(heads, head_dim, num_groups, state_dim, times_at, step_limits, dtype)
        steps = [conv.step(at=inner, outputs=mx.float32), ssm]
        super().__init__(in_proj=in_proj, out_proj=out_proj, spec=spec, steps=steps)
        self.inner = inner
        self.conv = conv
        self.norm = norm
        self.gate_first = gate_first
        self.num_groups = num_groups
        self.rate = mx.exp(log_rate)
        self.step_bias = step_bias
        self.skip = skip

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> the input of out_proj, (T, H * P)."""
        projected = self.in_proj(x)
        y = self.recur([projected], step)
        return self._gated(y, projected[:, : self.inner]).astype(x.dtype)

    def chain(self, inputs: Arrays, run: Run) -> tuple[mx.array, Arrays]:
        """See `RecurrentMixer`. Inputs: outputs of `in_proj` (B, L, ...)."""
        mixed, seen = run(0, inputs[0], *self.conv)
        y, state = run(1, mixed, inputs[0], self.rate, self.step_bias, self.skip)
        return y, [seen, state]

    def _gated(self, y: mx.array, gate: mx.array) -> mx.array:
        """Outputs of the heads (T, H * P) float32, gated and normalised."""
        gate = gate.astype(mx.float32)
        gate = gate * mx.sigmoid(gate)
        if self.norm is None:
            return y * gate
        y = y * gate if self.gate_first else y
        groups = self.num_groups
        grouped = mx.unflatten(y, -1, (groups, -1)) if groups > 1 else y
        normed = self.norm(grouped).reshape(y.shape)
        return normed if self.gate_first else normed * gate
