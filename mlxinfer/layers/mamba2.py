"""Mamba-2 as a mixer (arXiv 2405.21060): a state space with one decay a head and token.

B = sequences of a part, L = tokens of each, T = tokens of the step, H = heads in G groups of R, P =
numbers of a head, N = numbers of its state for each of them, Q = tokens of a chunk, K = chunks.
"""

import mlx.core as mx

from ..core import StateSpec
from .causal_conv import CausalConv
from .linear import Projection
from .norm import Norm
from .step import Arrays, Step

CHUNK = (
    64  # tokens that are mixed by products of matrices; only the state goes from one to the next
)


class Mamba2:
    """Heads whose state (P, N) decays, and takes up the outer product of inputs x and keys b.

    With time step t and rate a, the state S becomes exp(-a t) S + t x b^T, and the head's output is
    S c + d x, where b and c are shared by the heads of a group.

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
        "cuts",
        "gate_first",
        "group_heads",
        "in_proj",
        "inner",
        "norm",
        "out_proj",
        "rate",
        "skip",
        "spec",
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
        self.cuts = [self.inner, self.inner + conv.channels]
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.conv = conv
        self.norm = norm
        self.gate_first = gate_first
        self.rate = mx.exp(log_rate)
        self.step_bias = step_bias
        self.skip = skip[:, None]  # (H, 1)
        self.step_limits = step_limits
        self.spec = spec

    def mix(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> what is projected out, (T, H * P)."""
        gate, mixed, times = mx.split(self.in_proj(x), self.cuts, axis=-1)
        times = mx.logaddexp(times.astype(mx.float32) + self.step_bias, 0.0)
        times = mx.clip(times, *self.step_limits)  # (T, H)
        outputs = []
        for part in step.caches[self].parts:
            inputs = [part.take(mixed), part.take(times)]
            y, states = self.forward(inputs, part.read(), part.lengths)
            part.write(states, inputs, self.replay)
            outputs.append(y)
        return self._gated(step.caches[self].join(outputs), gate).astype(x.dtype)

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
        recur = self._step if x.shape[1] == 1 else self._scan
        y, state = recur(x * times[..., None], -self.rate * times, keys, queries, states[1])
        y = (y + self.skip * x).flatten(-2)
        return y, [self.conv.after(mixed, states[0], lengths), state]

    def replay(self, inputs: Arrays, states: Arrays, lengths: mx.array | None) -> Arrays:
        """The states after the first `lengths` (B,) tokens."""
        return self.forward(inputs, states, lengths)[1]

    def _step(
        self, x: mx.array, log_decay: mx.array, keys: mx.array, queries: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """One token of each sequence, as the definition says; arguments as of `_scan`."""
        served = self.group_heads[1]
        keys, queries = (mx.repeat(one[:, 0], served, axis=1) for one in (keys, queries))
        decay = mx.exp(log_decay[:, 0])[..., None, None]  # (B, H, 1, 1)
        state = decay * state + x[:, 0, :, :, None] * keys[:, :, None]  # (B, H, P, N)
        return (state @ queries[..., None])[..., 0][:, None], state

    def _scan(
        self, x: mx.array, log_decay: mx.array, keys: mx.array, queries: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Outputs (B, L, H, P) and the state, chunk by chunk.

        Args:
            x: (B, L, H, P), times the time steps.
            log_decay: (B, L, H).
            keys, queries: (B, L, G, N).
            state: (B, H, P, N).
        """
        length = x.shape[1]
        size = min(CHUNK, length)
        x = _chunks(mx.unflatten(x, 2, self.group_heads), size).transpose(0, 1, 3, 4, 2, 5)
        keys, queries = (
            _chunks(one, size).swapaxes(2, 3)[:, :, :, None] for one in (keys, queries)
        )  # (B, K, G, 1, Q, N)
        log_decay = _chunks(mx.unflatten(log_decay, 2, self.group_heads), size)
        since = mx.cumsum(log_decay.transpose(0, 1, 3, 4, 2), axis=-1)  # (B, K, G, R, Q)
        causal = mx.tri(size, dtype=mx.bool_)
        between = mx.where(causal, since[..., :, None] - since[..., None, :], -mx.inf)
        y = (mx.exp(between) * (queries @ keys.swapaxes(-1, -2))) @ x  # (B, K, G, R, Q, P)
        until_end = mx.exp(since[..., -1:] - since)[..., None]
        added = (x * until_end).swapaxes(-1, -2) @ keys  # (B, K, G, R, P, N)
        kept = mx.exp(since[..., -1])[..., None, None]  # (B, K, G, R, 1, 1)
        state = mx.unflatten(state, 1, self.group_heads)
        before = []
        for chunk in range(added.shape[1]):
            before.append(state)
            state = kept[:, chunk] * state + added[:, chunk]
        earlier = queries @ mx.stack(before, axis=1).swapaxes(-1, -2)  # (B, K, G, R, Q, P)
        y = y + mx.exp(since)[..., None] * earlier
        y = y.transpose(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
        return y[:, :length], state.flatten(1, 2)

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.out_proj(self.mix(x, step), residual)


def _chunks(x: mx.array, size: int) -> mx.array:
    """(B, L, ...) -> (B, K, Q, ...); zeros at the end, which change neither outputs nor states."""
    missing = -x.shape[1] % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return mx.unflatten(x, 1, (-1, size))
