"""Layers of a model that is spread over ranks: each computes a part, and links join the parts.

A matrix may be cut by its outputs, as those of queries, gates and the vocabulary are: then every
rank has some of the outputs. Or by its inputs, as those behind them are: then every rank has a
summand of all outputs, and the sum over the ranks is the product. So a block costs one sum, after
its last matrix (Megatron-LM, arXiv 1909.08053).

Or a rank has whole layers, and something that does nothing stands for those of the others.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx

from ..cache_specs import CacheSpec
from ..metal_kernels.variants import KernelUse, ModelForm
from .attention import LayerMixer, Mixer, ParallelMixers
from .linear import Embedding, Projection
from .step import Layer, Passed, Step

Summand = Literal["layers", "embedding", "tokens", "adapters", "features"]
"""The kind of numbers that are summed; links count their bytes by kind."""


class Link(Protocol):
    """Operations that all ranks do in the same order."""

    @property
    def rank(self) -> int:
        """This one's number, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, x: mx.array, of: Summand) -> mx.array:
        """The sum of every rank's x; the same bits everywhere."""

    def to_first(self, x: mx.array) -> mx.array:
        """x (T, n) of every rank, side by side in their order, on rank 0: (T, size * n).

        On the others something of T rows, which is to be evaluated. It is launched as it is called.
        """

    def send(self, x: mx.array) -> mx.array:
        """x, which the next rank receives once it is evaluated; behind the last is the first."""

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """The array that the rank before sends; before the first rank is the last one."""


class Sums:
    """Sums over ranks, which a block of several summands puts off to its end."""

    __slots__ = ("_held", "link")

    def __init__(self, link: Link) -> None:
        self.link = link
        self._held = False

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """The sum of every rank's x, plus the residual, which every rank has."""
        if not self._held:
            x = self.link.sum(x, "layers")
        return x if residual is None else residual + x

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave summands unsummed until the context ends."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before


@dataclass(slots=True, eq=False)
class Summed(Projection):
    """A projection or a feed-forward block; each rank has some of its inputs, and so a summand.

    A block may have several summands, as experts and a shared one: one sum for all of them.
    """

    part: Any  # this rank's; its bias, if there is one, is that of one rank only
    sums: Sums  # of the model

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        uses: list[KernelUse] = self.part.kernels(model)
        return uses

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, numbers of this rank) -> (T, numbers of all), plus the residual."""
        with self.sums.held():
            y = self.part(x)
        return self.sums(y, residual)


@dataclass(slots=True, eq=False)
class SplitEmbedding:
    """A token table; each rank has some of the rows."""

    part: Embedding  # this rank's rows, zeros behind the end of the vocabulary
    num_rows: int  # of each rank
    vocab_size: int  # of all
    link: Link  # of the ranks

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        local_ids = ids.astype(mx.int32) - self.link.rank * self.num_rows
        mine = (local_ids >= 0) & (local_ids < self.num_rows)
        rows = self.part(mx.where(mine, local_ids, 0))
        rows = mx.where(mine[:, None], rows, mx.zeros((), rows.dtype))
        return self.link.sum(rows, "embedding")

    def as_linear(self) -> "SplitHead":
        return SplitHead(self.part.as_linear(), self.vocab_size, self.link)


@dataclass(slots=True, eq=False)
class SplitHead(Projection):
    """An output projection; each rank has some of the outputs, and rank 0 gets all of them."""

    part: Projection  # (T, hidden) -> (T, outputs of this rank), as many on each
    vocab_size: int  # outputs of all ranks together; padding behind them is left out
    link: Link  # of the ranks

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, vocab_size) on rank 0; on the others T rows without a meaning."""
        assert residual is None, "nothing is added to logits"
        y = self.link.to_first(self.part(x))
        return y if y.shape[-1] <= self.vocab_size else y[:, : self.vocab_size]


@dataclass(slots=True, eq=False)
class AbsentMixer(Mixer):
    """Stands for the mixer of a layer on another rank, and says what its cache keeps there."""

    spec: CacheSpec

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        return []

    def __call__(self, x: mx.array, step: Step, residual: mx.array | None = None) -> mx.array:
        raise AssertionError("a layer of another rank")


class AbsentLayer(Layer):
    """A layer on another rank: x passes unchanged."""

    __slots__ = ("mixer",)

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        absent = [AbsentMixer(mixer.spec) for mixer in mixers]
        self.mixer: LayerMixer | None = ParallelMixers(absent) if absent else None

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """x (T, hidden) -> x."""
        return x, None


class AbsentTable(Projection):
    """The token table or the output projection of a model, which rank 0 has."""

    __slots__ = ()

    def __call__(self, *_: Any, **__: Any) -> mx.array:
        raise AssertionError("a table of rank 0")

    def as_linear(self) -> "AbsentTable":
        return self
