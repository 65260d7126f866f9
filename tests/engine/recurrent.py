"""A small recurrent mixer, and a tiny model that has it beside attention layers.

A gated linear recurrence with a matrix state (the outer products of keys and values, which decay)
and a token shift (the last input of a sequence): states of two shapes. B = sequences, L = tokens of
each, D = hidden size, H = heads, K = numbers of a key and a value.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
from models.tiny import tiny_checkpoint

from mlxinfer.cache.state import Arrays, InPlace, Read
from mlxinfer.cache_specs import StateSpec
from mlxinfer.layers.step import Step
from mlxinfer.metal_kernels.variants import KernelUse, ModelForm
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

HEADS, KEY = 2, 4


class Recurrence:
    """y_t = q_t S_t, with S_t = a_t S_{t-1} + k_t v_t^T, of the mean of x_t and x_{t-1}.

    Every operation is elementwise or a sum over a fixed axis of one token's own numbers, so that a
    token gives the same bits in any batch.
    """

    def __init__(self, hidden: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        width = HEADS * (3 * KEY + 1)
        self._into = mx.array(rng.normal(size=(hidden, width)).astype(np.float32) * hidden**-0.5)
        self._out = mx.array(rng.normal(size=(HEADS * KEY, hidden)).astype(np.float32) * 0.3)
        self.spec = StateSpec((((HEADS, KEY, KEY), "float32"), ((hidden,), "float32")))

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        y: mx.array = step.read_checked(step.caches[self].recur([x], self.advance))
        return y if residual is None else residual + y

    def advance(self, inputs: Arrays, read: Read, place: InPlace) -> tuple[mx.array, Arrays]:
        """Outputs (B, L, D), and the states after the tokens that count."""
        (x,), (states, lengths) = inputs, read()
        shifted = mx.concatenate([states[1][:, None], x[:, :-1]], axis=1)
        mixed = (x + shifted) * 0.5
        projected = (mixed[..., None] * self._into).sum(axis=-2)  # (B, L, width)
        queries, keys, values = (
            mx.unflatten(part, -1, (HEADS, KEY))
            for part in mx.split(projected[..., : HEADS * 3 * KEY], 3, axis=-1)
        )
        gates = mx.sigmoid(projected[..., HEADS * 3 * KEY :])  # (B, L, H)
        seen, new = self.recur([keys, values, gates, x], states, lengths)
        sums = (queries[..., None] * seen).sum(axis=-2).flatten(-2)  # (B, L, H * K)
        return (sums[..., None] * self._out).sum(axis=-2), new

    def recur(
        self, inputs: Arrays, states: Arrays, lengths: mx.array | None
    ) -> tuple[mx.array, Arrays]:
        """The matrix state after each token (B, L, H, K, K), and both states after `lengths`."""
        keys, values, gates, x = inputs
        matrix, last = states
        seen = []
        for t in range(x.shape[1]):
            outer = keys[:, t, :, :, None] * values[:, t, :, None]
            new = gates[:, t, :, None, None] * matrix + outer
            if lengths is None:
                matrix, last = new, x[:, t]
            else:
                real = t < lengths
                matrix = mx.where(real[:, None, None, None], new, matrix)
                last = mx.where(real[:, None], x[:, t], last)
            seen.append(matrix)
        return mx.stack(seen, axis=1), [matrix, last]


@cache
def hybrid_model(case: str, places: tuple[int, ...]) -> Model:
    """A tiny random model with recurrent mixers at `places`."""
    how = {"group_size": 32, "bits": 4}
    model = load(tiny_checkpoint(Path(mkdtemp()), case, quantize=how))
    for place in places:
        layer: Any = model.layers[place]
        layer.mixer = Recurrence(model.config.hidden_size, seed=place)
        model.mixers[place], model.cache_specs[place] = layer.mixer, layer.mixer.spec
    return model
