"""Mamba-2 as a mixer (arXiv 2405.21060): a state space with one decay a head and token.

B = sequences of a part, L = tokens of each, T = tokens of the step, H = heads in G groups of R, P =
numbers of a head, N = numbers of its state for each of them.
"""

import mlx.core as mx

from ..core import StateSpec
from ..metal_kernels.conv_step import ConvForm, conv_step
from ..metal_kernels.ssm_step import SSMForm, recurrence, ssm_step
from .causal_conv import CausalConv
from .linear import Projection
from .norm import Norm
from .recurrent import RecurrentMixer
from .step import Arrays, StatesBefore, Step


class Mamba2(RecurrentMixer):
    """Heads with a state (P, N) that decays, and takes up the outer product of inputs x and keys b.

    With time step t and rate a, the state S becomes exp(-a t) S + t x b^T, and the head's output is
    S c + d x, where b and c are shared by the heads of a group. On a GPU a few tokens go through
    `conv_step` and `ssm_step`.

    Args:
        in_proj: (T, hidden) -> gates (H P), x, b and c (H P, G N, G N), time steps (H).
        out_proj: (T, H * P) -> (T, hidden).
        conv: over x, b and c.
        norm: over (T, H * P), or (T, G, R * P) where there are several groups; None: no norm.
        gate_first: outputs are gated before the norm, else behind it.
        num_groups: G.
        log_rate, step_bias, skip: (H,) float32; log a, what is added to time steps, and d.
        step_limits: the smallest and the largest time step.
        spec: of two states, the convolution's and (H, P, N).
    """

    __slots__ = (
        "conv",
        "conv_form",
        "gate_first",
        "group_heads",
        "in_proj",
        "inner",
        "norm",
        "out_proj",
        "rate",
        "skip",
        "ssm_form",
        "state_dims",
        "step_bias",
        "step_limits",
    )

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
        heads, head_dim, self.state_dims = spec.shapes[1][0]
        self.group_heads = (num_groups, heads // num_groups)
        self.inner = heads * head_dim
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.conv = conv
        self.norm = norm
        self.gate_first = gate_first
        self.rate = mx.exp(log_rate)
        self.step_bias = step_bias
        self.skip = skip[:, None]  # (H, 1)
        self.step_limits = step_limits
        times_at, biased = self.inner + conv.channels, conv.bias is not None
        dtype = conv.weight.dtype
        self.conv_form = ConvForm(
            *(conv.channels, conv.length, self.inner, False, biased, dtype, mx.float32)
        )
        self.ssm_form = SSMForm(
            *(heads, head_dim, num_groups, self.state_dims, times_at, step_limits, dtype)
        )
        super().__init__(spec, [self.conv_form, self.ssm_form])

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> what is projected out, (T, H * P)."""
        projected = self.in_proj(x)
        y = self.recur([projected], step.caches[self])
        return self._gated(y, projected[:, : self.inner]).astype(x.dtype)

    def in_kernels(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """As of `RecurrentMixer`; inputs as of `in_mlx`."""
        (projected,), (plan, (carried, states)) = inputs, before.lying()
        mixed, seen = conv_step(
            projected, self.conv.weight, self.conv.bias, carried, plan, self.conv_form
        )
        heads = projected, self.rate, self.step_bias, self.skip
        y, state = ssm_step(mixed, *heads, states, plan, self.ssm_form)
        return y, [seen, state]

    def in_mlx(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """As of `RecurrentMixer`; inputs: what `in_proj` gives, (B, L, ...)."""
        (projected,), times_at = inputs, self.inner + self.conv.channels
        times = projected[..., times_at:].astype(mx.float32) + self.step_bias
        times = mx.clip(mx.logaddexp(times, 0.0), *self.step_limits)  # (B, L, H)
        mixed = projected[..., self.inner : times_at]
        return self.forward([mixed, times], before.read(), before.lengths)

    def _gated(self, y: mx.array, gate: mx.array) -> mx.array:
        """Outputs of the heads (T, H * P) float32, gated and normalised."""
        gate = gate.astype(mx.float32)
        gate = gate * mx.sigmoid(gate)
        if self.norm is None:
            return y * gate
        y = y * gate if self.gate_first else y
        groups = self.group_heads[0]
        grouped = mx.unflatten(y, -1, (groups, -1)) if groups > 1 else y
        normed = self.norm(grouped).reshape(y.shape)
        return normed if self.gate_first else normed * gate

    def forward(
        self, inputs: Arrays, states: Arrays, lengths: mx.array | None
    ) -> tuple[mx.array, Arrays]:
        """Outputs of the heads (B, L, H * P) float32, and the states after `lengths` (B,) tokens.

        Args:
            inputs: x, b and c (B, L, C); time steps (B, L, H) float32.
            states: before the tokens.
            lengths: tokens that count; None: all. A time step of 0 leaves a state as it is.
        """
        mixed, times = inputs
        if lengths is not None:
            real = mx.arange(times.shape[1]) < lengths[:, None]
            times = mx.where(real[..., None], times, 0.0)
        seen = self.conv(mixed, states[0]).astype(mx.float32)
        seen = seen * mx.sigmoid(seen)
        groups = self.group_heads[0]
        x, keys, queries = mx.split(
            seen, [self.inner, self.inner + groups * self.state_dims], axis=-1
        )
        x = mx.unflatten(x, -1, (times.shape[-1], -1))  # (B, L, H, P)
        keys, queries = (mx.unflatten(one, -1, (groups, -1)) for one in (keys, queries))
        y, state = recurrence(x * times[..., None], -self.rate * times, keys, queries, states[1])
        y = (y + self.skip * x).flatten(-2)
        return y, [self.conv.after(mixed, states[0], lengths), state]

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.out_proj(self.mix(x, step), residual)
