"""A residual stream for each block of layers, and layers that run several times (Inkling 2).

Consecutive layers form a block. A block adds its outputs to a vector of its own: the current block
to its vector so far, and each finished block has left one. A layer reads a mixture of these
vectors, which pass from layer to layer side by side.

Some layers, the core, run several times, and each pass begins with the same state. From the second
pass on, a layer of the core also reads messages: mixtures of the vectors that the previous pass
left. Nothing of this is kept between tokens.

T = tokens of the step, n = vectors of a token side by side: first those that messages mix (their
sources), then those of finished blocks, then that of the current block: (T, n * hidden).
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import mlx.core as mx

from ..metal_kernels.variants import KernelUse, ModelForm, kernels_of
from .linear import Projection
from .mlp import FeedForward
from .norm import Norm
from .relative_attention import RelativeAttention
from .residual_conv import ResidualConv
from .step import Layer, Passed, Step

SOURCE_EPS = 1e-6  # of the norm over sources, which has no weight


def mixed(sources: mx.array, queries: mx.array) -> list[mx.array]:
    """Mixtures of sources (T, n, hidden): (T, hidden) float32 for each of queries (N, hidden)."""
    normed = mx.fast.rms_norm(sources.astype(mx.float32), None, SOURCE_EPS)
    scores = normed @ queries.T * queries.shape[1] ** -0.5  # (T, n, N)
    shares = mx.softmax(scores, axis=1).swapaxes(1, 2)  # (T, N, n)
    mixtures = shares @ normed  # (T, N, hidden)
    return [mixtures[:, i] for i in range(len(queries))]


@dataclass(slots=True, eq=False)
class MessageGate:
    """(1 - forget) * x + gain * message; both follow from the two."""

    down: Projection  # (T, 2 * hidden) -> (T, rank)
    gain: mx.array  # (hidden, rank) float32
    forget: mx.array  # the same
    eps: float  # of the norms, which have no weight

    def __call__(self, x: mx.array, message: mx.array, dtype: mx.Dtype) -> mx.array:
        """x and message (T, hidden) float32 -> (T, hidden) float32; `down` computes in `dtype`."""
        normed = [mx.fast.rms_norm(part, None, self.eps) for part in (x, message)]
        inner = self.down(mx.concatenate(normed, axis=-1).astype(dtype)).astype(mx.float32)
        forget, gain = mx.tanh(inner @ self.forget.T), mx.tanh(inner @ self.gain.T)
        return (1 - forget) * x + gain * message


@dataclass(slots=True, eq=False)
class Messages:
    """The messages of the previous pass that a layer reads."""

    queries: mx.array  # (4, hidden) float32, of the mixtures for queries, keys, values and the MLP
    gates: Sequence[MessageGate]  # of the four


class BlockPlace(NamedTuple):
    """Where a layer stands among blocks."""

    # which of the vectors that come in the layer takes, in order; None: all
    order: tuple[int, ...] | None
    num_sources: int  # vectors of messages that pass through, at the front
    begins: bool  # the layer begins a block; the previous block is finished


@dataclass(slots=True, eq=False)
class MixedLayer(Layer):
    """Attention and experts, each behind a mixture, a norm and before a convolution."""

    mixer: RelativeAttention
    mlp: FeedForward
    _: KW_ONLY
    # (1 or 3, hidden) float32 of the mixtures that attention reads: one for all, or those of
    # queries, of keys and of values. None: it reads the current block.
    queries: mx.array | None
    mlp_query: mx.array  # (1, hidden) float32
    norms: tuple[Norm, ...]  # as many as `queries`, or one
    mlp_norm: Norm  # before the experts
    convs: tuple[ResidualConv, ResidualConv]  # over the outputs of both
    place: BlockPlace  # among blocks
    messages: Messages | None  # of the pass before; None: there is none
    hidden_size: int  # numbers of a vector

    @property
    def mixers(self) -> Sequence[object]:
        return [*self.mixer.parts, *self.convs]

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return kernels_of(model, self.mixer, self.mlp)

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """Vectors x (T, n * hidden) to those after the layer; a new block adds one."""
        vectors, dtype, place = mx.unflatten(x, -1, (-1, self.hidden_size)), x.dtype, self.place
        if place.order is not None:
            vectors = vectors[:, mx.array(place.order)]
        sources, state = mx.split(vectors, [place.num_sources], axis=1)
        messages = None
        if self.messages is not None:
            messages = mixed(sources, self.messages.queries)
        y = self._attended(state, messages, step, dtype).astype(mx.float32)
        if not place.begins:
            y = state[:, -1].astype(mx.float32) + y
            state = state[:, :-1]
        (z,) = mixed(mx.concatenate([state, y[:, None]], axis=1), self.mlp_query)
        if self.messages is not None and messages is not None:
            z = self.messages.gates[3](z, messages[3], dtype)
        z = self.convs[1](self.mlp(self.mlp_norm(z).astype(dtype)), step)
        last = (y + z.astype(mx.float32)).astype(dtype)
        return mx.concatenate([sources, state, last[:, None]], axis=1).flatten(1), None

    def _attended(
        self, state: mx.array, messages: list[mx.array] | None, step: Step, dtype: mx.Dtype
    ) -> mx.array:
        """The output of attention, (T, hidden); `state`: blocks (T, m, hidden)."""
        inputs = [state[:, -1]] if self.queries is None else mixed(state, self.queries)
        if self.messages is not None and messages is not None:
            gates, three = self.messages.gates, inputs * (3 // len(inputs))
            inputs = [gates[i](three[i], messages[i], dtype) for i in range(3)]
        count = max(len(inputs), len(self.norms))
        pairs = zip(
            self.norms * (count // len(self.norms)), inputs * (count // len(inputs)), strict=True
        )
        read = [norm(x).astype(dtype) for norm, x in pairs]
        queries, keys, values = read * (3 // len(read))
        return self.convs[0](self.mixer.attend(queries, keys, values, step), step)


class MixedBlocks:
    """One hidden state of all blocks: a mixture, and a norm over it."""

    __slots__ = ("hidden_size", "norm", "query")

    def __init__(self, query: mx.array, norm: Norm) -> None:
        self.query = query  # (1, hidden) float32
        self.norm = norm
        self.hidden_size = query.shape[1]

    def __call__(self, x: mx.array) -> mx.array:
        """Vectors x (T, n * hidden) -> (T, hidden)."""
        (mixture,) = mixed(mx.unflatten(x, -1, (-1, self.hidden_size)), self.query)
        return self.norm(mixture).astype(x.dtype)
