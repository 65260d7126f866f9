"""The gated delta recurrence over the few tokens of decoding and verification, and its twin.

B = sequences, L = tokens of each, Hk = key heads, Hv = value heads, Dk and Dv = numbers of a key
and of a value. One dispatch makes of what is projected (behind the convolution) the heads' outputs
and the states after the tokens that count: norms, decays and strengths are computed where they are
used, and each number of a state is read and written once, whatever L. Source of the recurrence:
arXiv 2412.06464; of one decay for each number of a key: arXiv 2510.26692.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import mlx.core as mx

from .launch import Launch, MetalKernel
from .state_rows import ARRAYS, INPUTS, LANES, gathered, lengths_of, team_lanes

TEAMS = 8  # SIMD-groups of a threadgroup
MAX_LAUNCHES = 64  # that are remembered: a decode step makes the same in every layer
EPS = 1e-6  # of the norms of queries and keys, added to the sum of squares


@dataclass(frozen=True, slots=True)
class DeltaForm:
    """What is compiled in.

    Attributes:
        key_heads, key_dim, value_heads, value_dim: Hk, Dk, Hv and Dv.
        each: every number of a key decays by itself; else each head does.
        strengths_at: place of the first strength among what is projected.
        times_at: place of the first time step in its array.
        dtype: of what is projected, and of the outputs.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    each: bool
    strengths_at: int
    times_at: int
    dtype: mx.Dtype

    @property
    def num_times(self) -> int:
        """Time steps of a token."""
        return self.value_heads * (self.key_dim if self.each else 1)

    @property
    def key_width(self) -> int:
        """Numbers of all queries and keys of a token."""
        return 2 * self.key_heads * self.key_dim


def delta_step(
    mixed: mx.array,
    projected: mx.array,
    times: mx.array,
    rates: mx.array,
    biases: mx.array,
    sources: Sequence[mx.array],
    plan: mx.array,
    form: DeltaForm,
) -> tuple[mx.array, mx.array]:
    """One dispatch.

    Args:
        mixed: (B, L, 2 Hk Dk + Hv Dv) queries, keys and values behind convolution and silu.
        projected: (B, L, W) with Hv strengths from `strengths_at` on, before their sigmoid.
        times: (B, L, W') with time steps from `times_at` on; may be `projected`.
        rates, biases: (num_times,) float32; decay is exp(-rate * softplus(time step + bias)).
        sources: `SOURCES` arrays (N, Hv, Dv, Dk) float32.
        plan: as of `plan_of`.
        form: of the layer.

    Returns:
        (B, L, Hv * Dv) of the form's dtype, zeros behind the tokens that count; and the states
        (B, Hv, Dv, Dk) float32 after these.
    """
    launch = _launch(form, mixed.shape)
    y, after = launch([mixed, projected, times, rates, biases, plan, *sources])
    return y, after


def delta_step_twin(
    mixed: mx.array,
    projected: mx.array,
    times: mx.array,
    rates: mx.array,
    biases: mx.array,
    sources: Sequence[mx.array],
    plan: mx.array,
    form: DeltaForm,
) -> tuple[mx.array, mx.array]:
    """The same in plain MLX; what stands behind the tokens that count is anything."""
    count = len(mixed)
    state, lengths = gathered(sources, plan, count), lengths_of(plan, count)
    return delta_in_mlx(mixed, projected, times, rates, biases, state, lengths, form)


def delta_in_mlx(
    mixed: mx.array,
    projected: mx.array,
    times: mx.array,
    rates: mx.array,
    biases: mx.array,
    state: mx.array,
    lengths: mx.array | None,
    form: DeltaForm,
) -> tuple[mx.array, mx.array]:
    """As the twin, from states (B, Hv, Dv, Dk) and tokens that count (B,); None: all."""
    qk, values = mx.split(mixed, [form.key_width], axis=-1)
    qk = mx.unflatten(qk, -1, (2 * form.key_heads, form.key_dim))
    qk = mx.fast.rms_norm(qk, None, EPS / form.key_dim)  # of length sqrt(Dk)
    queries, keys = mx.split(qk, 2, axis=-2)
    times = times[..., form.times_at : form.times_at + form.num_times].astype(mx.float32)
    decay = mx.exp(-rates * mx.logaddexp(times + biases, 0.0))
    if form.each:
        decay = mx.unflatten(decay, -1, (form.value_heads, -1))
    stop = form.strengths_at + form.value_heads
    strength = mx.sigmoid(projected[..., form.strengths_at : stop].astype(mx.float32))
    y, after = mx.fast.gated_delta_update(
        queries / form.key_dim,
        keys * form.key_dim**-0.5,
        mx.unflatten(values, -1, (form.value_heads, form.value_dim)),
        decay,
        strength,
        state,
        None if lengths is None else mx.arange(mixed.shape[1]) < lengths[:, None],
    )
    return y.flatten(-2), after


@lru_cache(MAX_LAUNCHES)
def _launch(form: DeltaForm, shape: tuple[int, ...]) -> Launch:
    count, tokens, width = shape
    assert width == form.key_width + form.value_heads * form.value_dim, shape
    lanes = team_lanes(form.key_dim)
    assert lanes is not None, form
    assert form.value_dim * lanes % LANES == 0, form
    across = form.value_dim * lanes
    return Launch(
        _kernel(),
        template=[
            ("T", form.dtype),
            ("KEYS", form.key_heads),
            ("DK", form.key_dim),
            ("HEADS", form.value_heads),
            ("DV", form.value_dim),
            ("TEAM", lanes),
            ("EACH", form.each),
            ("STRENGTHS_AT", form.strengths_at),
            ("TIMES_AT", form.times_at),
        ],
        grid=(across, form.value_heads, count),
        threadgroup=(min(TEAMS * LANES, across), 1, 1),
        output_shapes=[
            (count, tokens, form.value_heads * form.value_dim),
            (count, form.value_heads, form.value_dim, form.key_dim),
        ],
        output_dtypes=[form.dtype, mx.float32],
    )


@cache
def _kernel() -> MetalKernel:
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
                mixed_shape[1], place.x % TEAM);
        """,
    )
