"""The Mamba-2 recurrence over the few tokens of decoding and verification, and in plain MLX.

B = sequences, L = tokens of each, H = heads in G groups, P = numbers of a head, N = numbers of its
state for each of them. One dispatch makes the heads' outputs and the states after the tokens that
count. Each number of a state is read and written once, whatever L. Source of the recurrence: arXiv
2405.21060.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx

from .launch import Launch, MetalKernel, TemplateValue
from .state_step import (
    ARRAYS,
    INPUTS,
    Arrays,
    Result,
    StateStep,
    matrix_launch,
    step_kind,
    takes,
    team_lanes,
)

CHUNK = 64  # tokens mixed by products of matrices; only the state goes from one to the next
SUMS = 1e-3  # rounding of float32 sums in another order


@dataclass(frozen=True, slots=True, eq=False)
class SSMStep(StateStep):
    """With time step t, rate a and inputs x: S = exp(-a t) S + t x b^T.

    Outputs S c + d x are (B, L, H * P) float32, states S (B, H, P, N). Arrays:

    - mixed (B, L, H P + 2 G N) float32: inputs, keys b and queries c behind convolution and silu;
    - projected (B, L, W) with H time steps from `times_at` on, before bias and softplus;
    - rates, biases and skips d (H,) float32.

    Attributes:
        heads, head_dim, groups, state_dim: H, P, G and N.
        times_at: place of the first time step among `projected`.
        dtype: of `projected`.
    """

    name: ClassVar[str] = "ssm_step"

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    times_at: int
    limits: tuple[float, float]
    dtype: mx.Dtype

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.state_dim

    @property
    def has_kernel(self) -> bool:
        return takes(self.head_dim, self.state_dim)

    @property
    def registers(self) -> int:
        return 20 + 3 * (self.state_dim // (team_lanes(self.state_dim) or 1))

    def in_mlx(self, arrays: Arrays, state: mx.array, lengths: mx.array | None) -> Result:
        mixed, projected, rates, biases, skips = arrays
        x, keys, queries = mx.split(
            mixed, [self.inner, self.inner + self.groups * self.state_dim], axis=-1
        )
        x = mx.unflatten(x, -1, (self.heads, self.head_dim))  # (B, L, H, P)
        keys, queries = (mx.unflatten(one, -1, (self.groups, -1)) for one in (keys, queries))
        times = projected[..., self.times_at : self.times_at + self.heads].astype(mx.float32)
        times = mx.clip(mx.logaddexp(times + biases, 0.0), *self.limits)
        if lengths is not None:
            real = mx.arange(times.shape[1]) < lengths[:, None]
            times = mx.where(real[..., None], times, 0.0)
        y, after = recurrence(x * times[..., None], -rates * times, keys, queries, state)
        return (y + skips[:, None] * x).flatten(-2), after

    def launch(self, shape: tuple[int, ...]) -> Launch:
        count, tokens, width = shape
        assert width == self.inner + 2 * self.groups * self.state_dim, shape
        template: list[tuple[str, TemplateValue]] = [
            ("T", self.dtype),
            ("HEADS", self.heads),
            ("P", self.head_dim),
            ("GROUPS", self.groups),
            ("N", self.state_dim),
            ("TIMES_AT", self.times_at),
        ]
        return matrix_launch(self, _kernel(self.limits), template, (count, tokens), mx.float32)

    def drawn(self, normal: Callable[..., mx.array], lead: tuple[int, int]) -> list[Any]:
        mixed = 0.3 * normal(*lead, self.inner + 2 * self.groups * self.state_dim)
        projected = normal(*lead, self.times_at + self.heads).astype(self.dtype)
        return [mixed, projected, mx.exp(normal(self.heads)), *(normal(self.heads) for _ in "bd")]


def recurrence(
    x: mx.array, log_decay: mx.array, keys: mx.array, queries: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Outputs (B, L, H, P) and the state behind the last token, for any number of tokens.

    Args:
        x: (B, L, H, P), times the time steps. A time step of 0 leaves a state as it is.
        log_decay: (B, L, H).
        keys, queries: (B, L, G, N).
        state: (B, H, P, N).
    """
    groups, (count, tokens, heads, dim) = keys.shape[2], x.shape
    if tokens > 1:
        return _scan(x, log_decay, keys, queries, state, (groups, heads // groups))
    decay = mx.exp(log_decay[:, 0])[..., None, None]  # (B, H, 1, 1)
    taken = x.reshape(count, groups, -1, 1) * keys.reshape(count, groups, 1, -1)
    state = decay * state + taken.reshape(state.shape)
    # The vector stands first: MLX's CPU backend takes five times as long for matrix @ vector.
    rows = state.reshape(count, groups, -1, state.shape[-1])
    y = queries.reshape(count, groups, 1, -1) @ rows.swapaxes(-1, -2)  # (B, G, 1, R * P)
    return y.reshape(count, 1, heads, dim), state


def _scan(
    x: mx.array,
    log_decay: mx.array,
    keys: mx.array,
    queries: mx.array,
    state: mx.array,
    group_heads: tuple[int, int],
) -> tuple[mx.array, mx.array]:
    """The same as `recurrence`, in K chunks of Q tokens; the H heads are G groups of R heads."""
    length = x.shape[1]
    size = min(CHUNK, length)
    x = _chunks(mx.unflatten(x, 2, group_heads), size).transpose(0, 1, 3, 4, 2, 5)
    keys, queries = (
        _chunks(one, size).swapaxes(2, 3)[:, :, :, None] for one in (keys, queries)
    )  # (B, K, G, 1, Q, N)
    log_decay = _chunks(mx.unflatten(log_decay, 2, group_heads), size)
    since = mx.cumsum(log_decay.transpose(0, 1, 3, 4, 2), axis=-1)  # (B, K, G, R, Q)
    causal = mx.tri(size, dtype=mx.bool_)
    between = mx.where(causal, since[..., :, None] - since[..., None, :], -mx.inf)
    y = (mx.exp(between) * (queries @ keys.swapaxes(-1, -2))) @ x  # (B, K, G, R, Q, P)
    until_end = mx.exp(since[..., -1:] - since)[..., None]
    added = (x * until_end).swapaxes(-1, -2) @ keys  # (B, K, G, R, P, N)
    kept = mx.exp(since[..., -1])[..., None, None]  # (B, K, G, R, 1, 1)
    state = mx.unflatten(state, 1, group_heads)
    before = []
    for chunk in range(added.shape[1]):
        before.append(state)
        state = kept[:, chunk] * state + added[:, chunk]
    earlier = queries @ mx.stack(before, axis=1).swapaxes(-1, -2)  # (B, K, G, R, Q, P)
    y = y + mx.exp(since)[..., None] * earlier
    y = y.transpose(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
    return y[:, :length], state.flatten(1, 2)


def _chunks(x: mx.array, size: int) -> mx.array:
    """(B, L, ...) -> (B, K, Q, ...); zeros at the end, which change neither outputs nor states."""
    missing = -x.shape[1] % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return mx.unflatten(x, 1, (-1, size))


@cache
def _kernel(limits: tuple[float, float]) -> MetalKernel:
    low, high = ("INFINITY" if limit == float("inf") else f"{float(limit)!r}f" for limit in limits)
    return MetalKernel(
        name="ssm_step",
        inputs=("mixed", "projected", "rates", "biases", "skips", *INPUTS),
        outputs=("outputs", "after"),
        includes=("state_rows.h",),
        body=f"""
            const uint3 place = thread_position_in_grid;
            const Place own = place_of(plan, place.z);
            const device float* before = state_at(own, HEADS * P * N, {ARRAYS});
            ssm_step<HEADS, P, GROUPS, N, TEAM>(
                mixed, projected + TIMES_AT, projected_shape[2], rates, biases, skips,
                float2({low}, {high}),
                before, own.count, outputs, after, place.x / TEAM, place.y, place.z,
                mixed_shape[1], place.x % TEAM);
        """,
    )


_UNLIMITED = (0.0, float("inf"))
SSM_STEP = step_kind(
    SSMStep(8, 64, 1, 128, 64, _UNLIMITED, mx.bfloat16),  # Granite 4-H, some of its heads
    SSMStep(8, 64, 2, 256, 64, (0.001, 0.1), mx.bfloat16),  # as Falcon-H1, with limits
    rounding=dict.fromkeys(("float32", "float16", "bfloat16"), SUMS),
)
