"""Attention whose scores have a bias by distance, and a sink for each token and head (Inkling 2).

T = tokens of the step, H = query heads, Hk = KV heads, D = numbers of a head, r = numbers of a
relative state, E = distances that have a bias, S = tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache_specs import KVSpec
from ..metal_kernels.paged_attention import Softmax
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import AttentionShape, Mixer
from .linear import Projection
from .residual_conv import ResidualConv
from .step import Rows, Step

CLIP_EPS = 1e-6
MOST_SCORES = 1 << 26  # that are there at once


@dataclass(slots=True, eq=False)
class LogScale:
    """A factor that grows with the logarithm of the position: 1 + alpha * ln((p + 1) / floor)."""

    alpha: float  # of the logarithm
    floor: int  # up to this many tokens the factor is 1

    def prepare(self, positions: mx.array, variants: Rows | None = None) -> mx.array:
        """(T, 1, 1) float32, computed once a step."""
        share = (positions.astype(mx.float32) + 1) / self.floor
        return (1 + self.alpha * mx.log(mx.maximum(share, 1)))[:, None, None]

    def __call__(self, x: mx.array, prepared: mx.array) -> mx.array:
        """x (T, heads, numbers) to the same shape."""
        return (x.astype(mx.float32) * prepared).astype(x.dtype)


def clipped(x: mx.array, threshold: float, scale: mx.array | None = None) -> mx.array:
    """Heads x (T, heads, numbers), times `scale` (heads, numbers), no longer than `threshold`."""
    wide = x.astype(mx.float32)
    wide = wide if scale is None else wide * scale
    length = mx.sqrt(mx.sum(wide * wide, axis=-1, keepdims=True))
    return (wide * mx.minimum(threshold / (length + CLIP_EPS), 1)).astype(x.dtype)


@dataclass(slots=True, eq=False)
class ClippedHeads:
    """A projection to heads that are scaled and then clipped to a length."""

    proj: Projection  # (T, hidden) -> (T, heads * numbers)
    scale: mx.array  # (heads, numbers) float32
    threshold: float  # the longest that a head may be
    log_scale: LogScale | None  # of the result, by position; None: there is none

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> (T, heads, numbers)."""
        heads = self.proj(x).reshape(-1, *self.scale.shape)
        heads = clipped(heads, self.threshold, self.scale)
        scale = self.log_scale
        return heads if scale is None else scale(heads, step.prepared[scale])


@dataclass(slots=True, eq=False)
class RelativeBias:
    """What a step's tokens add to their scores; a cache attends with it, see `cache.paged.Choice`.

    A token's score of a token `d` before it has the bias states · profiles[:, d], and none from E
    on. Its sink is one more logit in the softmax, without a value.
    """

    states: mx.array  # (T, H, r) of the tokens
    profiles: mx.array  # (r, E)
    sinks: mx.array  # (T, H)
    window: int | None  # tokens that each sees; None: all before it

    def attend(self, layer: Any, queries: mx.array, softmax: Softmax) -> mx.array:
        """Queries (T, H, D) over what a layer has stored, (T, H * D)."""
        outputs: list[mx.array] = []
        for place in layer.prepared.sequences():
            keys, values = (_with_zero(layer.read_whole(p, place)) for p in layer.views())
            tokens = mx.arange(place.first, place.first + keys.shape[2] - 1)  # (S,)
            rows = max(1, MOST_SCORES // (queries.shape[1] * keys.shape[2]))
            for start in range(place.rows.start, place.rows.stop, rows):
                block = slice(start, min(start + rows, place.rows.stop))
                heads = queries[block].swapaxes(0, 1)[None]  # (1, H, n, D)
                heads = mx.depends(heads, outputs[-1]) if outputs else heads
                mask = self.mask(block, place.positions(block) - tokens).astype(heads.dtype)
                output = mx.fast.scaled_dot_product_attention(
                    heads, keys, values, scale=softmax.scale, mask=mask
                )
                outputs.append(output[0].swapaxes(0, 1).flatten(1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def mask(self, rows: slice, distances: mx.array) -> mx.array:
        """(1, H, n, S + 1) what is added to scores of rows `own` (n); the sink comes last.

        `distances`: (n, S) to the tokens of the sequence.
        """
        states, extent = self.states[rows], self.profiles.shape[1]
        profiles = (states @ self.profiles).swapaxes(0, 1).astype(mx.float32)  # (H, n, E)
        index = mx.broadcast_to(
            mx.clip(distances, 0, extent - 1), (len(profiles), *distances.shape)
        )
        bias = mx.take_along_axis(profiles, index, axis=-1)
        seen = distances >= 0
        if self.window is not None:
            seen = seen & (distances < self.window)
        bias = mx.where(seen, mx.where(distances < extent, bias, 0), -mx.inf)
        sinks = self.sinks[rows].astype(mx.float32).T[..., None]  # (H, n, 1)
        return mx.concatenate([bias, sinks], axis=-1)[None]


def _with_zero(vectors: mx.array) -> mx.array:
    """(Hk, S, D) -> (1, Hk, S + 1, D): a sink has the score 0 before its logit, and no value."""
    return mx.pad(vectors, [(0, 0), (0, 1), (0, 0)])[None]


@dataclass(slots=True, eq=False, kw_only=True)
class RelativeAttention(AttentionShape, Mixer):
    """Attention without rope; queries, keys and values may have inputs of their own.

    Relative states, sinks and gates read the input of the queries.
    """

    queries: ClippedHeads
    states: ClippedHeads  # relative
    k_proj: Projection  # (T, hidden) -> (T, Hk * D)
    v_proj: Projection  # the same
    k_conv: ResidualConv  # over what `k_proj` gives
    v_conv: ResidualConv  # over what `v_proj` gives
    sink_proj: Projection  # (T, hidden) -> (T, H)
    gate_proj: Projection  # (T, hidden) -> (T, H * D), gates of the outputs before their sigmoid
    o_proj: Projection  # (T, H * D) -> (T, hidden)
    profiles: mx.array  # (r, E) the biases by distance
    v_eps: float  # of the RMS norm over values, which has no weight
    spec: KVSpec  # what the cache keeps

    def __post_init__(self) -> None:
        AttentionShape.__init__(self, self.queries.scale.shape[0])

    @property
    def parts(self) -> Sequence[Mixer]:
        return self, self.k_conv, self.v_conv

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        return self.attend(x, x, x, step, residual)

    def attend(
        self,
        for_queries: mx.array,
        for_keys: mx.array,
        for_values: mx.array,
        step: Step,
        residual: mx.array | None = None,
    ) -> mx.array:
        """Inputs (T, hidden) of queries, of keys and of values -> (T, hidden)."""
        heads = -1, self.spec.num_kv_heads, self.spec.key_dim
        keys = self.k_conv(self.k_proj(for_keys), step, for_keys).reshape(heads)
        values = self.v_conv(self.v_proj(for_values), step, for_values).reshape(heads)
        bias = RelativeBias(
            self.states(for_queries, step),
            self.profiles,
            self.sink_proj(for_queries),
            self.spec.window,
        )
        outputs = step.caches[self].attend(
            self.queries(for_queries, step),
            clipped(keys, self.queries.threshold),
            mx.fast.rms_norm(values, None, self.v_eps),
            Softmax(self.spec.key_dim**-0.5),
            bias,
        )
        gates = mx.sigmoid(self.gate_proj(for_queries).astype(mx.float32))
        gated = (outputs.astype(mx.float32) * gates).astype(outputs.dtype)
        return self.o_proj(gated, residual)
