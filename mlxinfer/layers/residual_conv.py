"""A short causal convolution that adds its input: Inkling 2.

B = sequences of a part, L = tokens of each, C = channels, K = length of the convolution.
"""

from typing import Any

import mlx.core as mx

from ..cache_specs import StateSpec
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import Mixer
from .linear import Projection
from .step import Arrays, PlaceStates, ReadStates, Step


class ResidualConv(Mixer):
    """(x_t + Σ taps[lag] * x_{t - lag}) / root of the number of summands, in float32.

    Args:
        taps: (K, C) float32 of each channel, the token's own first.
        spec: of one state, the inputs of the last K - 1 tokens.
        weight_proj: more taps that each token gives, for all channels of a head: another input
            (T, hidden) -> (T, heads * K). None: there are none.
    """

    __slots__ = ("scale", "spec", "taps", "weight_proj")

    def __init__(
        self, taps: mx.array, spec: StateSpec, weight_proj: Projection | None = None
    ) -> None:
        self.taps = taps
        self.spec = spec
        self.weight_proj = weight_proj
        self.scale = (1 + len(taps) * (1 if weight_proj is None else 2)) ** -0.5

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, C) to the same shape; `residual`: what `weight_proj` reads, (T, hidden)."""
        inputs = [x]
        if self.weight_proj is not None:
            assert residual is not None
            inputs.append(self.weight_proj(residual))
        filtered: Any = step.caches[self].recur(inputs, self._advance)
        return filtered.astype(x.dtype)

    def _advance(
        self, inputs: Arrays, read: ReadStates, place: PlaceStates
    ) -> tuple[mx.array, Arrays]:
        (before,), lengths = read()
        x, count = inputs[0].astype(mx.float32), len(self.taps)
        seen, length = mx.concatenate([before, x], axis=1), x.shape[1]
        windows = mx.stack([seen[:, at : at + length] for at in range(count - 1, -1, -1)], axis=2)
        taps = self.taps  # (K, C), and windows (B, L, K, C)
        if len(inputs) > 1:
            more = mx.unflatten(inputs[1].astype(mx.float32), -1, (-1, count)).swapaxes(-1, -2)
            taps = taps + mx.repeat(more, x.shape[-1] // more.shape[-1], axis=-1)
        y = ((windows * taps).sum(axis=2) + x) * self.scale
        if lengths is None:
            return y, [seen[:, length:]]
        places = lengths[:, None] + mx.arange(count - 1)
        return y, [mx.take_along_axis(seen, places[..., None], axis=1)]
