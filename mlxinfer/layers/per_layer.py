"""Per-layer embeddings: every layer adds something that depends on the token itself (Gemma 3n, 4).

T = tokens of the step, L = layers, P = numbers of an input.
"""

import mlx.core as mx

from .linear import Embedding, Projection
from .mlp import Gated
from .norm import Norm
from .step import Step

_MIX = 2.0**-0.5  # of the two parts of an input


class PerLayerInputs:
    """Each layer's input: a row of a table, and a projection of the token's embedding.

    Args:
        table: of (vocabulary, L * P).
        vocab_size: rows of it; tokens beyond take the first.
        picture_id: the token whose row the features of a picture take.
        projection: (T, hidden) -> (T, L * P).
        norm: over the P numbers of a projected embedding.
        num_layers: L.
        scale: multiplies projected embeddings.
    """

    __slots__ = ("norm", "num_layers", "picture_id", "projection", "scale", "table", "vocab_size")

    def __init__(
        self,
        table: Embedding,
        *,
        vocab_size: int,
        picture_id: int,
        projection: Projection,
        norm: Norm,
        num_layers: int,
        scale: float,
    ) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.picture_id = picture_id
        self.projection = projection
        self.norm = norm
        self.num_layers = num_layers
        self.scale = scale

    def __call__(self, ids: mx.array, x: mx.array, step: Step) -> mx.array:
        """Leave the inputs (T, L, P) in the step; embeddings x (T, hidden) stay as they are."""
        rows = self.table(mx.where(ids < self.vocab_size, ids, 0))
        if step.features is not None:
            rows[step.features.rows] = self.table(mx.array([self.picture_id]))
        own = mx.unflatten(rows, -1, (self.num_layers, -1))
        mixed = mx.unflatten(self.projection(x) * self.scale, -1, (self.num_layers, -1))
        step.per_layer = (self.norm(mixed) + own * own.shape[-1] ** 0.5) * _MIX
        return x


class PerLayerGate:
    """The share of one layer: norm(up(act(gate(x)) * input)).

    Args:
        index: of the layer.
        gate: (T, hidden) -> (T, P).
        up: (T, P) -> (T, hidden).
        norm: over the hidden size.
        activation: of what `gate` gives, times the input.
    """

    __slots__ = ("activation", "gate", "index", "norm", "up")

    def __init__(
        self, index: int, *, gate: Projection, up: Projection, norm: Norm, activation: Gated
    ) -> None:
        self.index = index
        self.gate = gate
        self.up = up
        self.norm = norm
        self.activation = activation

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> (T, hidden)."""
        assert step.per_layer is not None
        both = mx.concatenate([self.gate(x), step.per_layer[:, self.index]], axis=-1)
        return self.norm(self.up(self.activation(both)))
