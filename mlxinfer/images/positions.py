"""Positions of tokens by which keys and queries turn, where pictures have three of each (M-RoPE).

Text counts on all three axes alike. The features of one frame share a time; rows and columns count
from where its grid begins. What follows the grid goes on behind its longer side, however long a
video is, so positions fall behind the places of the tokens. Source: Qwen2-VL, arXiv 2409.12191;
videos: transformers 5.24, models/qwen2_5_vl.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .picture import PlacedPicture


class _Grid(NamedTuple):
    """Features that are rows and columns, in a run of tokens."""

    start: int  # place of the first token
    rows: int
    columns: int
    times: tuple[int, ...]  # of its frames

    @property
    def size(self) -> int:
        """Tokens."""
        return len(self.times) * self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.size

    def axes(self, cells: NDArray[np.int32]) -> NDArray[np.int32]:
        """(3, N) time, row and column of features, by their numbers in the grid."""
        frames, cells = np.divmod(cells, np.int32(self.rows * self.columns))
        times = np.array(self.times, np.int32)[frames]
        return np.stack([times, *np.divmod(cells, np.int32(self.columns))])

    @property
    def lag(self) -> int:
        """How far the positions behind the grid fall behind the places of the tokens."""
        return self.size - max(self.rows, self.columns)


def rope_positions(pictures: Sequence[PlacedPicture], start: int, stop: int) -> NDArray[np.int32]:
    """Positions of the tokens at places [start, stop) of a sequence: time, row, column.

    Args:
        pictures: of the sequence, in order. Those without `turns` have the positions of text.
        start, stop: of the wanted tokens, anywhere in the sequence.

    Returns:
        (3, stop - start).
    """
    found = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
    for grid in _grids(pictures):
        first, last = max(grid.start, start), min(grid.stop, stop)
        behind = max(grid.stop - start, 0)
        if first < last:
            cells = np.arange(first, last, dtype=np.int32) - grid.start
            found[:, first - start : last - start] += grid.axes(cells) - cells
        found[:, behind:] -= np.int32(grid.lag)
    return found


def rope_delta(pictures: Sequence[PlacedPicture]) -> int:
    """The position of a token behind all pictures, less its place; 0 or less."""
    return -sum(grid.lag for grid in _grids(pictures))


def _grids(pictures: Sequence[PlacedPicture]) -> Iterator[_Grid]:
    """The grids of all pictures in order: each run of features is one grid, or several."""
    for picture, start in pictures:
        if picture.turns is None:
            continue
        is_feature = np.asarray(picture.token_ids) == picture.feature_id
        rows, columns = picture.turns
        size = len(picture.times) * rows * columns
        for first in np.flatnonzero(is_feature)[::size].tolist():
            yield _Grid(start + first, rows, columns, picture.times)
