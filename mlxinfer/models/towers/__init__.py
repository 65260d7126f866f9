"""Towers: the part of a model that sees. Patches of a picture in, vectors for its tokens out."""

from collections.abc import Generator
from typing import NamedTuple, Protocol

import mlx.core as mx

from ...images import Tile


class Features(NamedTuple):
    """The features of one tile."""

    vectors: mx.array  # (N, hidden) of the text model, in place of embeddings; nothing scales them
    # (N, hidden) each, added after decoder layer 0, 1, ... (DeepStack); mostly none.
    deep: tuple[mx.array, ...] = ()


class Tower(Protocol):
    """The part of a model that sees. One tile at a time: no mask, and no P x P array."""

    @property
    def width(self) -> int:
        """Numbers of one feature: `hidden`, and as many again for each array of `Features.deep`."""
        ...

    def run(self, tile: Tile) -> Generator[mx.array, None, Features]:
        """Compute the features of a tile, piece by piece.

        Yields:
            After each few blocks the array that is to be evaluated before it goes on, so that the
            steps of running answers come in between.
        """
        ...

    def arrays(self) -> list[mx.array]: ...
