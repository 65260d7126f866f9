"""A causal convolution over the few tokens of decoding and verification, and its plain-MLX twin.

B = sequences, L = tokens of each, C = channels, K = length of the convolution. One dispatch makes
of the inputs and the states (`state_rows`) the outputs, behind silu or between two gates, and the
states after the tokens that count: no array of what the convolution sees is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import mlx.core as mx

from .launch import Launch, MetalKernel
from .state_rows import ARRAYS, INPUTS, gathered, lengths_of

THREADS = 256
MAX_LAUNCHES = 64  # that are remembered: a decode step makes the same in every layer
MAX_LENGTH = 8  # of a convolution: a thread keeps its inputs and weights


@dataclass(frozen=True, slots=True)
class ConvForm:
    """What is compiled in.

    Attributes:
        channels, length: C and K.
        at: place of the first channel among a token's inputs.
        gated: from there on stand gates before, gates behind and values, C numbers each; else
            values, and silu follows.
        biased: there is a bias.
        dtype: of inputs and weights.
        outputs: dtype of what comes of them.
    """

    channels: int
    length: int
    at: int
    gated: bool
    biased: bool
    dtype: mx.Dtype
    outputs: mx.Dtype


def conv_step(
    inputs: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    sources: Sequence[mx.array],
    plan: mx.array,
    form: ConvForm,
) -> tuple[mx.array, mx.array]:
    """One dispatch.

    Args:
        inputs: (B, L, W) of the form's dtype.
        weight: (C, K), or (C, K, 1) as MLX has it.
        bias: (C,) where there is one.
        sources: `SOURCES` arrays (N, K - 1, C) float32.
        plan: as of `plan_of`.
        form: of the layer.

    Returns:
        (B, L, C) of the form's output dtype, zeros behind the tokens that count; and the states
        (B, K - 1, C) float32 after these.
    """
    launch = _launch(form, inputs.shape)
    y, after = launch([inputs, weight, weight if bias is None else bias, plan, *sources])
    return y, after


def conv_step_twin(
    inputs: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    sources: Sequence[mx.array],
    plan: mx.array,
    form: ConvForm,
) -> tuple[mx.array, mx.array]:
    """The same in plain MLX; what stands behind the tokens that count is anything."""
    count = len(inputs)
    state, lengths = gathered(sources, plan, count), lengths_of(plan, count)
    return conv_in_mlx(inputs, weight, bias, state, lengths, form)


def conv_in_mlx(
    inputs: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    state: mx.array,
    lengths: mx.array | None,
    form: ConvForm,
) -> tuple[mx.array, mx.array]:
    """As the twin, from states (B, K - 1, C) and tokens that count (B,); None: all."""
    channels = form.channels
    inputs = inputs[..., form.at :]
    values = inputs[..., :channels]
    if form.gated:
        values = values * inputs[..., 2 * channels : 3 * channels]
    seen = mx.concatenate([state.astype(values.dtype), values], axis=1)
    y = mx.conv1d(seen, weight.reshape(channels, form.length, 1), groups=channels)
    if bias is not None:
        y = y + bias
    if form.gated:
        y = inputs[..., channels : 2 * channels] * y
    else:
        y = y.astype(form.outputs)
        y = y * mx.sigmoid(y)
    if lengths is None:
        return y, seen[:, inputs.shape[1] :].astype(mx.float32)
    places = lengths[:, None] + mx.arange(form.length - 1)
    return y, mx.take_along_axis(seen, places[..., None], axis=1).astype(mx.float32)


@lru_cache(MAX_LAUNCHES)
def _launch(form: ConvForm, shape: tuple[int, ...]) -> Launch:
    count, tokens, width = shape
    channels = form.channels
    assert width >= form.at + (3 if form.gated else 1) * channels, shape
    assert 2 <= form.length <= MAX_LENGTH, form
    return Launch(
        _kernel(),
        template=[
            ("T", form.dtype),
            ("OUT", form.outputs),
            ("C", channels),
            ("K", form.length),
            ("AT", form.at),
            ("GATED", form.gated),
            ("BIASED", form.biased),
        ],
        grid=(channels, count, 1),
        threadgroup=(min(THREADS, channels), 1, 1),
        output_shapes=[(count, tokens, channels), (count, form.length - 1, channels)],
        output_dtypes=[form.outputs, mx.float32],
    )


@cache
def _kernel() -> MetalKernel:
    return MetalKernel(
        name="conv_step",
        inputs=("inputs", "weight", "bias", *INPUTS),
        outputs=("outputs", "after"),
        includes=("state_rows.h",),
        body=f"""
            const uint channel = thread_position_in_grid.x, sequence = thread_position_in_grid.y;
            const Place place = place_of(plan, sequence);
            const device float* before = state_at(place, (K - 1) * C, {ARRAYS});
            conv_step<T, OUT, C, K, GATED, BIASED>(
                inputs + AT, inputs_shape[2], weight, bias,
                before, place.count, outputs, after, channel, sequence, inputs_shape[1]);
        """,
    )
