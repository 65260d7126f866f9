"""Layers of a model that is spread over ranks: each computes a part, and links join the parts.

A matrix may be cut by its outputs, as those of queries, gates and the vocabulary are: then every
rank has some of the outputs. Or by its inputs, as those behind them are: then every rank has a
summand of all outputs, and the sum over the ranks is the product. So a block costs one sum, after
its last matrix (Megatron-LM, arXiv 1909.08053).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx

from .linear import Embedding, Projection
from .mlp import FeedForward


class Link(Protocol):
    """What joins the ranks: operations that all of them do in the same order."""

    @property
    def rank(self) -> int:
        """This one's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, x: mx.array) -> mx.array:
        """The sum of every rank's x; the same bits everywhere."""
        ...

    def gather(self, x: mx.array) -> mx.array:
        """x (T, n) of every rank, side by side in their order: (T, size * n)."""
        ...


class Sums:
    """Sums over ranks, which a block of several summands puts off to its end.

    Args:
        link: of the ranks.
    """

    __slots__ = ("_held", "link")

    def __init__(self, link: Link) -> None:
        self.link = link
        self._held = False

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """The sum of every rank's x, plus the residual, which all of them have."""
        if not self._held:
            x = self.link.sum(x)
        return x if residual is None else residual + x

    @contextmanager
    def held(self) -> Iterator[None]:
        """Until its end, summands stay what they are."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before


class Summed:
    """A projection of which each rank has some of the inputs.

    Args:
        part: this rank's; its bias, if there is one, is that of one rank only.
        sums: of the model.
    """

    __slots__ = ("part", "sums")

    def __init__(self, part: Projection, sums: Sums) -> None:
        self.part = part
        self.sums = sums

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, in_dims of this rank) -> (T, out_dims), plus the residual."""
        return self.sums(self.part(x), residual)


class SummedBlock:
    """A feed-forward block of several summands, as experts and a shared one: one sum for all."""

    __slots__ = ("block", "sums")

    def __init__(self, block: FeedForward, sums: Sums) -> None:
        self.block = block
        self.sums = sums

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, hidden), plus the residual."""
        with self.sums.held():
            y = self.block(x)
        return self.sums(y, residual)


class SplitEmbedding:
    """A table of which each rank has some of the rows.

    Args:
        part: this rank's rows, zeros behind the end of the vocabulary.
        num_rows: of each rank.
        vocab_size: of all.
        link: of the ranks.
    """

    __slots__ = ("link", "num_rows", "part", "vocab_size")

    def __init__(self, part: Embedding, num_rows: int, vocab_size: int, link: Link) -> None:
        self.part = part
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.link = link

    def __call__(self, ids: mx.array) -> mx.array:
        """ids (T,) -> (T, hidden_size)."""
        own = ids.astype(mx.int32) - self.link.rank * self.num_rows
        mine = (own >= 0) & (own < self.num_rows)
        rows = self.part(mx.where(mine, own, 0))
        return self.link.sum(mx.where(mine[:, None], rows, mx.zeros((), rows.dtype)))

    def as_linear(self) -> "SplitHead":
        """The output projection of a model that shares the table with its input."""
        return SplitHead(self.part.as_linear(), self.vocab_size, self.link)


class SplitHead:
    """An output projection of which each rank has some of the outputs; every rank gets them all.

    Args:
        part: (T, hidden) -> (T, outputs of this rank), as many on each.
        vocab_size: outputs of all together; what is more is left out.
        link: of the ranks.
    """

    __slots__ = ("link", "part", "vocab_size")

    def __init__(self, part: Projection, vocab_size: int, link: Link) -> None:
        self.part = part
        self.vocab_size = vocab_size
        self.link = link

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x (T, hidden) -> (T, vocab_size), plus the residual."""
        y = self.link.gather(self.part(x))
        y = y if y.shape[-1] == self.vocab_size else y[:, : self.vocab_size]
        return y if residual is None else residual + y
