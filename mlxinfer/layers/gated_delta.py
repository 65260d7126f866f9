"""Gated DeltaNet as a mixer (arXiv 2412.06464): linear attention with decay and the delta rule.

B = sequences of a part, L = tokens of each, T = tokens of the step, Hk = key heads, Hv = value
heads (a multiple of Hk: each key head serves Hv / Hk neighbours), Dk and Dv = numbers of a key and
of a value.
"""

from typing import Any

import mlx.core as mx

from ..core import StateSpec
from ..metal_kernels.conv_step import ConvForm, conv_step
from ..metal_kernels.delta_step import DeltaForm, delta_step
from .causal_conv import CausalConv
from .linear import Projection
from .norm import Norm
from .recurrent import RecurrentMixer
from .step import Arrays, StatesBefore, Step

_EPS = 1e-6  # of the norms of queries and keys, as in the published kernels


class GatedDeltaNet(RecurrentMixer):
    """A matrix of keys and values for each head, which every token decays and corrects in part.

    With decay a, strength b, and q and k of length 1, the state S (Dv, Dk) becomes
    a S + b (v - a S k) k^T, and the head's output is S q / sqrt(Dk). The recurrence is
    `mx.fast.gated_delta_update`; on the CPU it gives the same bits for any split into steps. On a
    GPU a few tokens go through `conv_step` and `delta_step`.

    Args:
        in_proj: (T, hidden) -> queries, keys and values (Hk Dk, Hk Dk, Hv Dv), output gates
            (Hv Dv), strengths and time steps (Hv each), side by side.
        out_proj: (T, Hv * Dv) -> (T, hidden).
        conv: over queries, keys and values.
        norm: over the Dv numbers of each head's output.
        log_rate: (Hv,) float32; decay is exp(-exp(log_rate) * softplus(time step + step_bias)).
        step_bias: (Hv,) float32.
        spec: of two states, the convolution's and (Hv, Dv, Dk).
    """

    __slots__ = (
        "conv",
        "conv_form",
        "delta_form",
        "gated",
        "in_proj",
        "key_width",
        "norm",
        "out_proj",
        "qk_heads",
        "qk_scales",
        "rate",
        "step_bias",
        "value_heads",
    )

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
    ) -> None:
        heads, value_dim, key_dim = spec.shapes[1][0]
        self.key_width = conv.channels - heads * value_dim  # of queries and keys together
        self.value_heads = (heads, value_dim)
        self.qk_heads = (self.key_width // key_dim, key_dim)  # the queries' heads, then the keys'
        scales = [1 / key_dim, key_dim**-0.5]  # what the norm leaves to do, see `_normed`
        self.qk_scales = mx.repeat(mx.array(scales), self.qk_heads[0] // 2)[:, None]  # (2 Hk, 1)
        self.gated = slice(conv.channels, conv.channels + heads * value_dim)  # output gates
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.conv = conv
        self.norm = norm
        self.rate = mx.exp(log_rate)
        self.step_bias = step_bias
        self.conv_form = conv_form(conv)
        self.delta_form = self._delta_form(each=len(log_rate) > heads)  # as of `KimiDelta`
        super().__init__(spec, [self.conv_form, self.delta_form])

    def _delta_form(self, *, each: bool) -> DeltaForm:
        heads, value_dim = self.value_heads
        strengths_at = self.conv.channels if each else self.gated.stop
        return DeltaForm(
            key_heads=self.qk_heads[0] // 2,
            key_dim=self.qk_heads[1],
            value_heads=heads,
            value_dim=value_dim,
            each=each,
            strengths_at=strengths_at,
            times_at=0 if each else strengths_at + heads,
            dtype=self.conv.weight.dtype,
        )

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> what is projected out, (T, Hv * Dv)."""
        projected = self.in_proj(x)
        gate = projected[:, self.gated]
        return self.normed([projected], step) * (gate * mx.sigmoid(gate))

    def normed(self, rows: Arrays, step: Step) -> mx.array:
        """What the recurrence makes of rows (T, ...), normalised, (T, Hv * Dv)."""
        y = self.recur(rows, step.caches[self])
        return self.norm(mx.unflatten(y, -1, self.value_heads)).flatten(-2)

    def in_kernels(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """As of `RecurrentMixer`; inputs as of `in_mlx`."""
        plan, (carried, states) = before.lying()
        mixed, seen = conv_step(
            inputs[0], self.conv.weight, self.conv.bias, carried, plan, self.conv_form
        )
        gates = inputs[0], inputs[-1], self.rate, self.step_bias
        y, state = delta_step(mixed, *gates, states, plan, self.delta_form)
        return y, [seen, state]

    def in_mlx(self, inputs: Arrays, before: StatesBefore) -> tuple[mx.array, Arrays]:
        """As of `RecurrentMixer`.

        Args:
            inputs: what `in_proj` gives (B, L, ...); where time steps are not among it, these too.
            before: the states.
        """
        form = self.delta_form
        times = inputs[-1][..., form.times_at : form.times_at + form.num_times]
        times = times.astype(mx.float32) + self.step_bias
        decay = mx.exp(-self.rate * mx.logaddexp(times, 0.0))  # (B, L, num_times)
        strengths = inputs[0][..., form.strengths_at : form.strengths_at + form.value_heads]
        strength = mx.sigmoid(strengths.astype(mx.float32))
        qkv = inputs[0][..., : self.conv.channels]
        return self.forward([qkv, decay, strength], before.read(), before.lengths)

    def forward(
        self, inputs: Arrays, states: Arrays, lengths: mx.array | None
    ) -> tuple[mx.array, Arrays]:
        """Outputs of the heads (B, L, Hv * Dv), and the states after `lengths` (B,) tokens.

        Args:
            inputs: queries, keys and values (B, L, C); decay (B, L, Hv), or (B, L, Hv * Dk) where
                each number of a key has its own, and strength (B, L, Hv), float32.
            states: before the tokens.
            lengths: tokens that count; None: all.
        """
        qkv, decay, strength = inputs
        mixed = self.conv(qkv, states[0])
        mixed = mixed * mx.sigmoid(mixed)
        qk, values = mx.split(mixed, [self.key_width], axis=-1)
        queries, keys = mx.split(self._normed(mx.unflatten(qk, -1, self.qk_heads)), 2, axis=-2)
        values = mx.unflatten(values, -1, self.value_heads)
        mask = None if lengths is None else mx.arange(qkv.shape[1]) < lengths[:, None]
        heads, _ = self.value_heads
        if decay.shape[-1] > heads:
            decay = mx.unflatten(decay, -1, (heads, -1))
        y, state = mx.fast.gated_delta_update(
            queries, keys, values, decay, strength, states[1], mask
        )
        return y.flatten(-2), [self.conv.after(qkv, states[0], lengths), state]

    def _normed(self, qk: mx.array) -> mx.array:
        """(..., 2 Hk, Dk) with length 1, queries also divided by sqrt(Dk).

        MLX's norm gives length sqrt(Dk); its epsilon is of the mean square, ours of the sum.
        """
        eps = _EPS / qk.shape[-1]
        return mx.fast.rms_norm(qk, None, eps) * self.qk_scales.astype(qk.dtype)

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.out_proj(self.mix(x, step), residual)


class KimiDelta(GatedDeltaNet):
    """Kimi Delta Attention (arXiv 2510.26692): each number of a key decays by itself.

    Args:
        in_proj: (T, hidden) -> queries, keys and values (3 H D), and strengths (H), side by side.
        decay_projs: (T, hidden) -> time steps (T, H * D), through few numbers.
        gate_projs: (T, hidden) -> output gates (T, H * D), in the same way.
        log_rate: (H,) float32.
        step_bias: (H * D,) float32.
        others: as of `GatedDeltaNet`.
    """

    __slots__ = ("decay_projs", "gate_projs")

    def __init__(
        self,
        *,
        decay_projs: tuple[Projection, Projection],
        gate_projs: tuple[Projection, Projection],
        log_rate: mx.array,
        step_bias: mx.array,
        spec: StateSpec,
        **others: Any,
    ) -> None:
        each = mx.repeat(log_rate, spec.shapes[1][0][2])  # (H * D,)
        super().__init__(log_rate=each, step_bias=step_bias, spec=spec, **others)
        self.decay_projs = decay_projs
        self.gate_projs = gate_projs

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> what is projected out, (T, H * D)."""
        times, gate = (up(down(x)) for down, up in (self.decay_projs, self.gate_projs))
        return self.normed([self.in_proj(x), times], step) * mx.sigmoid(gate)


def conv_form(conv: CausalConv) -> ConvForm:
    """Of the convolution that the first channels of a projection go through, behind it silu."""
    dtype = conv.weight.dtype
    return ConvForm(conv.channels, conv.length, 0, False, conv.bias is not None, dtype, dtype)
