"""The gated delta recurrence over the few tokens of decoding and verification, and in plain MLX.

B = sequences, L = tokens of each, Hk = key heads, Hv = value heads, Dk and Dv = numbers of a key
and of a value. One dispatch makes the heads' outputs and the states after the tokens that count.
Norms, decays and strengths are computed where they are used, and each number of a state is read and
written once, whatever L. Source of the recurrence: arXiv 2412.06464; of one decay for each number
of a key: arXiv 2510.26692.
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

EPS = 1e-6  # of the norms of queries and keys, added to the sum of squares


@dataclass(frozen=True, slots=True, eq=False)
class DeltaStep(StateStep):
    """With decay a, strength b, and q and k of length 1: S = a S + b (v - a S k) k^T.

    Outputs S q / sqrt(Dk) are (B, L, Hv * Dv) of `dtype`, states S (B, Hv, Dv, Dk). Arrays:

    - mixed (B, L, 2 Hk Dk + Hv Dv): queries, keys and values behind convolution and silu;
    - projected (B, L, W) with Hv strengths from `strengths_at` on, before their sigmoid, which is
      multiplied by `strongest`;
    - times (B, L, W') with time steps from `times_at` on; may be `projected`;
    - rates and biases (num_times,) float32; decay is exp(-rate * softplus(time step + bias)), or
      with a bound exp(bound * sigmoid(rate * (time step + bias))).

    Attributes:
        key_heads, key_dim, value_heads, value_dim: Hk, Dk, Hv and Dv.
        per_channel: every number of a key decays by itself; else each head does.
        strengths_at: place of the first strength among `projected`.
        times_at: place of the first time step in its array.
        bound: below 0, of the logarithm of a decay; 0: there is none.
        strongest: the limit of strengths; above 1 a state may turn round (arXiv 2411.12537).
    """

    name: ClassVar[str] = "delta_step"

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    per_channel: bool
    strengths_at: int
    times_at: int
    dtype: mx.Dtype
    bound: float = 0.0
    strongest: float = 1.0

    @property
    def num_times(self) -> int:
        return self.value_heads * (self.key_dim if self.per_channel else 1)

    @property
    def key_width(self) -> int:
        return 2 * self.key_heads * self.key_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.value_heads, self.value_dim, self.key_dim

    @property
    def has_kernel(self) -> bool:
        return takes(self.value_dim, self.key_dim)

    @property
    def registers(self) -> int:
        return 20 + 4 * (self.key_dim // (team_lanes(self.key_dim) or 1))

    def in_mlx(self, arrays: Arrays, state: mx.array, lengths: mx.array | None) -> Result:
        mixed, projected, times, rates, biases = arrays
        qk, values = mx.split(mixed, [self.key_width], axis=-1)
        qk = mx.unflatten(qk, -1, (2 * self.key_heads, self.key_dim))
        # MLX's norm gives length sqrt(Dk); its epsilon is of the mean square.
        qk = mx.fast.rms_norm(qk, None, EPS / self.key_dim)
        queries, keys = mx.split(qk, 2, axis=-2)
        times = times[..., self.times_at : self.times_at + self.num_times].astype(mx.float32)
        if self.bound:
            decay = mx.exp(self.bound * mx.sigmoid(rates * (times + biases)))
        else:
            decay = mx.exp(-rates * mx.logaddexp(times + biases, 0.0))
        if self.per_channel:
            decay = mx.unflatten(decay, -1, (self.value_heads, -1))
        stop = self.strengths_at + self.value_heads
        strength = mx.sigmoid(projected[..., self.strengths_at : stop].astype(mx.float32))
        if self.strongest != 1.0:
            strength = strength * self.strongest
        outputs, after = mx.fast.gated_delta_update(
            queries / self.key_dim,
            keys * self.key_dim**-0.5,
            mx.unflatten(values, -1, (self.value_heads, self.value_dim)),
            decay,
            strength,
            state,
            None if lengths is None else mx.arange(mixed.shape[1]) < lengths[:, None],
        )
        return outputs.flatten(-2), after

    def launch(self, shape: tuple[int, ...]) -> Launch:
        count, tokens, width = shape
        assert width == self.key_width + self.value_heads * self.value_dim, shape
        template: list[tuple[str, TemplateValue]] = [
            ("T", self.dtype),
            ("KEYS", self.key_heads),
            ("DK", self.key_dim),
            ("HEADS", self.value_heads),
            ("DV", self.value_dim),
            ("EACH", self.per_channel),
            ("STRENGTHS_AT", self.strengths_at),
            ("TIMES_AT", self.times_at),
        ]
        kernel = _kernel(self.bound, self.strongest)
        return matrix_launch(self, kernel, template, (count, tokens), self.dtype)

    def drawn(self, normal: Callable[..., mx.array], lead: tuple[int, int]) -> list[Any]:
        width, num_times = self.strengths_at + self.value_heads, self.times_at + self.num_times
        mixed = normal(*lead, self.key_width + self.value_heads * self.value_dim)
        # Time steps are part of `projected`, unless every number of a key has its own.
        projected = normal(*lead, width if self.per_channel else max(width, num_times)).astype(
            self.dtype
        )
        times = normal(*lead, num_times).astype(self.dtype) if self.per_channel else projected
        rates, biases = mx.exp(normal(self.num_times)), normal(self.num_times)
        return [mixed.astype(self.dtype), projected, times, rates, biases]


@cache
def _kernel(bound: float, strongest: float) -> MetalKernel:
    return MetalKernel(
        name="delta_step",
        inputs=("mixed", "projected", "times", "rates", "biases", *INPUTS),
        outputs=("outputs", "after"),
        includes=("state_rows.h",),
        body=f"""
            const uint3 place = thread_position_in_grid;
            const Place own = place_of(plan, place.z);
            const device float* before = state_at(own, HEADS * DV * DK, {ARRAYS});
            delta_step<T, KEYS, DK, HEADS, DV, TEAM, EACH>(
                mixed, projected + STRENGTHS_AT, projected_shape[2], times + TIMES_AT,
                times_shape[2], rates, biases,
                before, own.count, outputs, after, place.x / TEAM, place.y, place.z,
                mixed_shape[1], place.x % TEAM, {float(bound)!r}f,
                {float(strongest)!r}f);
        """,
    )


DELTA_STEP = step_kind(
    DeltaStep(4, 128, 8, 128, False, 64, 72, mx.bfloat16),  # a quarter of Qwen 3.5 35B-A3B
    DeltaStep(2, 128, 2, 128, True, 0, 0, mx.bfloat16),  # Kimi Linear, some of its heads
    DeltaStep(2, 128, 2, 128, True, 0, 0, mx.bfloat16, -5.0),  # Ling 3.0, some of its heads
)
