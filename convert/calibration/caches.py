"""Caches of each kind of layer for whole sequences of one length, which start at 0.

N = sequences, L = tokens of each, H = heads; a step has N * L rows, sequence by sequence.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...core import CacheSpec, LatentSpec, OwnCacheSpec, StateSpec
from ...errors import ConversionError
from ...layers.latent_attention import LatentProjection
from ...layers.step import Advance, Arrays
from ...metal_kernels.paged_attention import Softmax


def whole_sequences(spec: CacheSpec, length: int) -> Any:
    """The cache of a layer that keeps `spec`, for sequences of `length` tokens."""
    if isinstance(spec, StateSpec):
        return WholeStates(spec, length)
    assert not isinstance(spec, OwnCacheSpec), "convert knows native families only"
    if isinstance(spec, LatentSpec) and spec.index_dim and length > spec.num_ranked:
        raise ConversionError(
            f"This model sees {spec.num_ranked} tokens of a text, and measuring it takes texts of "
            f"{length}, of which all are seen; convert it without calibration."
        )
    return (WholeLatents if isinstance(spec, LatentSpec) else WholeSequences)(length, spec.window)


class WholeSequences:
    """Causal attention."""

    heads: Any = None  # norms and rope are the layer's own work

    def attend_heads(
        self,
        qkv: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """Never used, since `heads` is None."""
        raise AssertionError("attend_heads without heads")

    def __init__(self, length: int, window: int | None) -> None:
        at, of = mx.arange(length)[:, None], mx.arange(length)[None]
        seen = of <= at
        self._mask = seen if window is None else seen & (of > at - window)
        self._length = length

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        softmax: Softmax,
    ) -> mx.array:
        """(N * L, heads, dim) each -> (N * L, heads * value_dim)."""
        q, k, v = (
            a.reshape(-1, self._length, *a.shape[1:]).swapaxes(1, 2)
            for a in (queries, keys, values)
        )
        scale, sinks, soft_cap = softmax
        if soft_cap is not None:
            found = self._capped(q * scale, k, v, soft_cap)
        else:
            found = mx.fast.scaled_dot_product_attention(
                q, k, v, scale=scale, mask=self._mask, sinks=sinks
            )
        return found.swapaxes(1, 2).reshape(queries.shape[0], -1)

    def _capped(self, q: mx.array, k: mx.array, v: mx.array, soft_cap: float) -> mx.array:
        """(N, heads, L, D) each -> (N, heads, L, V), with scores of at most `soft_cap`."""
        group = q.shape[1] // k.shape[1]
        k, v = mx.repeat(k, group, axis=1), mx.repeat(v, group, axis=1)
        scores = mx.tanh(q @ k.swapaxes(-1, -2) / soft_cap) * soft_cap
        scores = mx.where(self._mask, scores, mx.array(-mx.inf, scores.dtype))
        return mx.softmax(scores, axis=-1, precise=True) @ v


class WholeLatents:
    """Causal latent attention, expanded."""

    def __init__(self, length: int, window: int | None) -> None:
        self._expanded = WholeSequences(length, window)

    def attend(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        *,
        projection: LatentProjection,
        scale: float,
        index: object = None,
    ) -> mx.array:
        """As of LatentCache: -> (N * L, H, dv); no `index` leaves any of so few tokens out."""
        k_nope, values = projection.expand(latent)
        k_rope = mx.broadcast_to(k_rope[:, None], q_rope.shape)
        keys = mx.concatenate([k_nope, k_rope], axis=-1)
        queries = mx.concatenate([q_nope, q_rope], axis=-1)
        found = self._expanded.attend(queries, keys, values, Softmax(scale))
        return found.reshape(values.shape)


class WholeStates:
    """Recurrence from its beginning; the one part of a step is the whole of it."""

    lengths = None

    def __init__(self, spec: StateSpec, length: int) -> None:
        self._spec = spec
        self._length = length
        self._num_sequences = 0

    @property
    def parts(self) -> "Sequence[WholeStates]":
        """All sequences at once."""
        return [self]

    def take(self, x: mx.array) -> mx.array:
        """x (N * L, D) -> (N, L, D)."""
        taken = mx.unflatten(x, 0, (-1, self._length))
        self._num_sequences = taken.shape[0]
        return taken

    @property
    def before(self) -> "WholeStates":
        """The states before: there are none."""
        return self

    def read(self) -> Arrays:
        """Zeros (N, ...)."""
        return [mx.zeros((self._num_sequences, *shape)) for shape, _ in self._spec.shapes]

    def lying(self) -> tuple[mx.array, Sequence[Arrays]]:
        """Never used: no kernel is ready here."""
        raise AssertionError("kernels without an engine")

    def write(self, states: Arrays, inputs: Arrays, advance: Advance) -> None:
        """Nothing follows."""

    def join(self, outputs: Arrays) -> mx.array:
        """(N, L, D) -> (N * L, D)."""
        return mx.flatten(outputs[0], 0, 1)
