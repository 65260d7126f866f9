"""Hyper-connections (arXiv 2409.19606): the residual is several streams of hidden states.

Each block reads a mixture of the streams, and its output is added to each of them with a weight of
its own. All weights follow from the streams of the token itself: nothing is kept between tokens.
`GatedConnection` leaves the streams as they are; `MixingConnection` mixes them with each other too.

T = tokens of the step, n = streams, side by side: (T, n * hidden).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import mlx.core as mx

from ..metal_kernels.mixing import Mixing, mixing, mixing_twin
from ..metal_kernels.variants import ANY_ROWS, KernelUse, ModelForm, ReadyFor, kernels_of
from .attention import LayerMixer, Mixer
from .linear import Projection
from .mlp import FeedForward
from .moe import TokenIds
from .norm import Norm
from .step import Layer, Passed, Step

Block = Callable[[mx.array], mx.array]
"""A block of a layer: hidden states (T, hidden) -> its output (T, hidden)."""


class HyperConnection(Protocol):
    """The way from the streams into a block and back."""

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels of its own work."""

    def __call__(self, x: mx.array, block: Block) -> mx.array:
        """Streams x (T, n * hidden) -> the same after the block."""


class Inject(Protocol):
    """A part of a layer that adds to the streams before its blocks read them."""

    @property
    def parts(self) -> Sequence[Mixer]:
        """Its mixers, each with a cache of its own."""

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels of the part."""

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        """The array that is added to the streams x (T, n * hidden), of their shape."""


@dataclass(slots=True, eq=False)
class StreamMixture:
    """One hidden state of n streams: their mean, each number with a gate of low rank."""

    norm: Norm  # over each stream, (T, n, hidden) to the same shape
    down: Projection  # (T, n * hidden) -> (T, rank)
    up: Projection  # (T, rank) -> (T, n * hidden), the gates before their sigmoid
    num_streams: int  # n

    def normed(self, x: mx.array) -> mx.array:
        """Streams x (T, n * hidden), each normalised by itself."""
        return self.norm(mx.unflatten(x, -1, (self.num_streams, -1))).flatten(-2)

    def mixed(self, normed: mx.array) -> mx.array:
        """Normalised streams (T, n * hidden) -> (T, hidden)."""
        inner = self.down(normed) / self.num_streams
        gates = mx.sigmoid(self.up(inner * mx.sigmoid(inner)))
        return mx.unflatten(gates * normed, -1, (self.num_streams, -1)).mean(axis=-2)

    def __call__(self, x: mx.array) -> mx.array:
        """Streams x (T, n * hidden) -> (T, hidden)."""
        return self.mixed(self.normed(x))


@dataclass(slots=True, eq=False)
class GatedConnection:
    """The block reads the mixture; each stream takes its output times 2 * sigmoid of a number."""

    mixture: StreamMixture  # of the streams
    weights: Projection  # of normalised streams (T, n * hidden) -> (T, n), a number for each stream

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, block: Block) -> mx.array:
        normed = self.mixture.normed(x)
        shares = 2 * mx.sigmoid(self.weights(normed) / self.mixture.num_streams)  # (T, n)
        y = block(self.mixture.mixed(normed))
        return x + (shares[..., None] * y[..., None, :]).flatten(-2)


@dataclass(slots=True, eq=False)
class StreamLogits:
    """Numbers that follow from all streams of a token: a projection of what their RMS norm gives.

    Computed in float32, whatever the streams' dtype.
    """

    weight: mx.array  # (rows, n * hidden) float32
    scale: mx.array  # (rows,) float32; multiplies what `weight` gives
    base: mx.array  # (rows,) float32; is added then
    eps: float  # added to the mean square, which is over all streams

    def __call__(self, x: mx.array) -> mx.array:
        """Streams x (T, n * hidden) -> (T, rows) float32."""
        normed = mx.fast.rms_norm(x.astype(mx.float32), None, self.eps)
        return normed @ self.weight.T * self.scale + self.base


@dataclass(slots=True, eq=False)
class WeightedStreams:
    """One hidden state of n streams: their sum, each with a weight of sigmoid(logit) + eps."""

    logits: StreamLogits  # streams (T, n * hidden) -> (T, n)
    norm: Norm  # over the sum
    eps: float  # of the weights

    def __call__(self, x: mx.array) -> mx.array:
        """Streams x (T, n * hidden) -> (T, hidden)."""
        return self.norm(_weighted(x, mx.sigmoid(self.logits(x)) + self.eps))


@dataclass(slots=True, eq=False)
class MeanOfStreams:
    """One hidden state of n streams: their mean, and a norm over it."""

    norm: Norm
    num_streams: int

    def __call__(self, x: mx.array) -> mx.array:
        """Streams x (T, n * hidden) -> (T, hidden)."""
        return self.norm(mx.unflatten(x, -1, (self.num_streams, -1)).mean(axis=-2))


class MixingConnection:
    """The streams are mixed with each other where the block's output joins them.

    Rows and columns of the mixing matrix each sum to about 1, so that the streams do not grow from
    layer to layer: manifold-constrained hyper-connections, arXiv 2512.24880. All weights are
    float32.

    Args:
        logits: streams (T, n * hidden) -> (T, n + n + n * n): of the weights with which the block
            reads the streams, of those with which they take its output, and of the matrix.
    """

    __slots__ = ("_in_kernel", "form", "logits", "norm")

    def __init__(self, logits: StreamLogits, norm: Norm, form: Mixing) -> None:
        self.logits = logits
        self.norm = norm
        self.form = form
        self._in_kernel = False

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return [KernelUse({ANY_ROWS: [self.form.variant]}, self._install)] * self.form.has_kernel

    def _install(self, ready: ReadyFor) -> None:
        self._in_kernel = ready(1)

    def __call__(self, x: mx.array, block: Block) -> mx.array:
        weigh = mixing if self._in_kernel else mixing_twin
        read, write, matrix = weigh(self.logits(x), self.form)
        y = block(self.norm(_weighted(x, read)))
        taken = write[..., None] * y[..., None, :]  # (T, n, hidden)
        streams = mx.unflatten(x, -1, (self.form.num_streams, -1)).astype(mx.float32)
        return (taken + matrix @ streams).flatten(-2).astype(x.dtype)


def _weighted(x: mx.array, weights: mx.array) -> mx.array:
    """The sum (T, hidden) of streams x (T, n * hidden) with weights (T, n), which are float32."""
    streams = mx.unflatten(x, -1, (weights.shape[-1], -1)).astype(mx.float32)
    return (weights[..., None, :] @ streams)[..., 0, :].astype(x.dtype)


@dataclass(slots=True, eq=False)
class Streams:
    """The entry of a decoder: every stream begins with the embedding. Layers may read ids."""

    count: int  # streams
    tokens: TokenIds | None = None  # are told the ids; None: nothing but the step is

    def __call__(self, ids: mx.array, x: mx.array, step: Step) -> mx.array:
        """x (T, hidden) -> (T, count * hidden)."""
        step.ids = ids
        if self.tokens is not None:
            self.tokens.ids = ids
        return mx.tile(x, (1, self.count))


@dataclass(slots=True, eq=False)
class StreamLayer(Layer):
    """A layer whose residual is several streams. Its norms are parts of its connections."""

    connections: tuple[HyperConnection, HyperConnection]  # of the mixer, and of the other block
    mixer: LayerMixer
    mlp: FeedForward
    inject: Inject | None = None  # what is added before

    @property
    def mixers(self) -> Sequence[Mixer]:
        """Those of `inject`, which come first, and those of the mixer."""
        return [*(() if self.inject is None else self.inject.parts), *self.mixer.parts]

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels of all parts; those of attention belong to the cache."""
        return kernels_of(model, self.inject, self.mixer, self.mlp, *self.connections)

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """Streams x (T, n * hidden) to the same shape."""
        if self.inject is not None:
            x = x + self.inject(x, step)
        to_mixer, to_mlp = self.connections
        x = to_mixer(x, partial(self.mixer, step=step))
        return to_mlp(x, self.mlp), None
