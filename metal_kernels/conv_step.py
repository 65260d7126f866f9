"""A causal convolution over the few tokens of decoding and verification, and its plain-MLX form.

B = sequences, L = tokens of each, C = channels, K = length of the convolution. One dispatch makes
the outputs, behind silu or between two gates, and the states after the tokens that count. The
state of a sequence is what the next token still sees: the inputs of its last K - 1 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx

from .launch import MIN_NUMBERS, Launch, MetalKernel
from .state_step import ARRAYS, INPUTS, Arrays, Result, StateStep, step_kind

THREADS = 256
MAX_LENGTH = 8  # of a convolution: a thread keeps its inputs and weights


@dataclass(frozen=True, slots=True, eq=False)
class ConvStep(StateStep):
    """Arrays: inputs (B, L, W) of `dtype`, weights (C, K, 1) and a bias (C,) or None.

    Outputs are (B, L, C), states (B, K - 1, C).

    Attributes:
        at: place of the first channel among a token's inputs.
        gated: from there on stand gates before, gates behind and values, C numbers each; else
            values, and silu follows.
    """

    name: ClassVar[str] = "conv_step"

    channels: int
    length: int
    at: int
    gated: bool
    biased: bool
    dtype: mx.Dtype
    outputs: mx.Dtype

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.length - 1, self.channels

    @property
    def has_kernel(self) -> bool:
        return 2 <= self.length <= MAX_LENGTH and self.channels >= MIN_NUMBERS

    @property
    def registers(self) -> int:
        return 16 + 2 * self.length

    def in_mlx(self, arrays: Arrays, state: mx.array, lengths: mx.array | None) -> Result:
        inputs, weight, bias = arrays

        def part(number: int) -> mx.array:
            start = self.at + number * self.channels
            return inputs[..., start : start + self.channels]

        values = part(0) * part(2) if self.gated else part(0)
        seen = mx.concatenate([state.astype(values.dtype), values], axis=1)
        y = mx.conv1d(seen, weight, groups=self.channels)
        y = y if bias is None else y + bias
        if self.gated:
            y = part(1) * y
        else:
            y = y.astype(self.outputs)
            y = y * mx.sigmoid(y)
        if lengths is None:
            return y, seen[:, inputs.shape[1] :].astype(mx.float32)
        places = lengths[:, None] + mx.arange(self.length - 1)  # (B, K - 1)
        return y, mx.take_along_axis(seen, places[..., None], axis=1).astype(mx.float32)

    def launch(self, shape: tuple[int, ...]) -> Launch:
        count, tokens, width = shape
        assert width >= self.at + (3 if self.gated else 1) * self.channels, shape
        return Launch(
            _kernel(),
            template=[
                ("T", self.dtype),
                ("OUT", self.outputs),
                ("C", self.channels),
                ("K", self.length),
                ("AT", self.at),
                ("GATED", self.gated),
                ("BIASED", self.biased),
            ],
            grid=(self.channels, count, 1),
            threadgroup=(min(THREADS, self.channels), 1, 1),
            output_shapes=[(count, tokens, self.channels), (count, *self.state_shape)],
            output_dtypes=[self.outputs, mx.float32],
        )

    def drawn(self, normal: Callable[..., mx.array], lead: tuple[int, int]) -> list[Any]:
        width = self.at + (3 if self.gated else 1) * self.channels
        arrays = [normal(*lead, width), normal(self.channels, self.length, 1)]
        bias = normal(self.channels).astype(self.dtype) if self.biased else None
        return [*(array.astype(self.dtype) for array in arrays), bias]


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


_F32, _BF16 = mx.float32, mx.bfloat16
CONV_STEP = step_kind(
    ConvStep(2048, 3, 0, True, False, _BF16, _BF16),  # LFM2 1.2B
    ConvStep(3072, 4, 2048, False, True, _BF16, _F32),  # Mamba-2
    ConvStep(8192, 4, 0, False, False, _BF16, _BF16),  # Qwen 3.5 35B-A3B
)
