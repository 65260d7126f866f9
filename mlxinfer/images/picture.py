"""A picture as the engine gets it: patches for the model's tower, and its tokens in the prompt.

Plain data. `images` makes it of pixels, the session places it in a prompt, the engine has the tower
compute its features, and puts these in place of the embeddings of its tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """One input of a tower: a whole picture, a cut of one, or a pair of frames."""

    # (P, row) float32, in the order and the layout that the tower reads. The numbers are in the
    # order (row, column, colour) for Gemma 4 and LFM2, (colour, row, column) for Gemma 3 and
    # Pixtral, (colour, frame, row, column) for Qwen. Patches lie row by row; those of Qwen block by
    # block, as its merger takes them.
    patches: NDArray[np.float32] = field(repr=False)
    grid: tuple[int, int, int]  # frames, rows and columns of patches; their product is P
    num_features: int  # vectors that the tower gives for it


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture that is ready for one model.

    Attributes:
        tiles: inputs of the tower, whose features follow each other.
        token_ids: what stands in the prompt for it, in place of the template's one placeholder.
        feature_id: the token id, among these, that stands for one feature; the others are text,
            such as the end of a row. It stands there as often as the tiles have features.
        digest: 16 bytes, of pixels, grids and processor: pictures of equal digests have equal
            features.
        mrope_grid: (rows, columns) of its features for families with three-dimensional positions
            (M-RoPE). None: its tokens have the positions of text.
        times: of each grid of `mrope_grid`, how far its position in time is from that of the first;
            the grids of a video follow each other in one run of features.
        sees_itself: features of one run of `feature_id` see each other, in the layers that say so
            (`KVSpec.sees_spans`).
    """

    tiles: tuple[Tile, ...]
    token_ids: tuple[int, ...]
    feature_id: int
    digest: bytes
    mrope_grid: tuple[int, int] | None = None
    sees_itself: bool = False
    times: tuple[int, ...] = (0,)

    @property
    def num_features(self) -> int:
        return sum(tile.num_features for tile in self.tiles)


class Shown(NamedTuple):
    """One picture or video of a message as a model sees it."""

    pictures: tuple[Picture, ...]  # one; or what a video is made of, in order
    # what is encoded in place of the text that the template writes for it, with the placeholder of
    # each picture; "": the same
    text: str = ""


class PlacedPicture(NamedTuple):
    """A picture in a prompt."""

    picture: Picture
    start: int  # position of the first of its `token_ids`

    @property
    def stop(self) -> int:
        return self.start + len(self.picture.token_ids)


# -- rope positions -------------------------------------------------------------------------------


class _Grid(NamedTuple):
    start: int  # place of the first token
    rows: int
    columns: int
    times: tuple[int, ...]  # of its frames

    @property
    def size(self) -> int:
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
        return self.size - max(self.rows, self.columns)


def rope_positions(pictures: Sequence[PlacedPicture], start: int, stop: int) -> NDArray[np.int32]:
    """Positions of the tokens at places [start, stop) of a sequence: time, row, column.

    Args:
        pictures: of the sequence, in order. Those without `mrope_grid` have the positions of text.
        start, stop: of the wanted tokens, anywhere in the sequence.

    Returns:
        (3, stop - start).
    """
    positions = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
    for grid in _grids(pictures):
        first, last = max(grid.start, start), min(grid.stop, stop)
        behind = max(grid.stop - start, 0)
        if first < last:
            cells = np.arange(first, last, dtype=np.int32) - grid.start
            positions[:, first - start : last - start] += grid.axes(cells) - cells
        positions[:, behind:] -= np.int32(grid.lag)
    return positions


def rope_delta(pictures: Sequence[PlacedPicture]) -> int:
    """The position of a token behind all pictures, less its place; 0 or less."""
    return -sum(grid.lag for grid in _grids(pictures))


def _grids(pictures: Sequence[PlacedPicture]) -> Iterator[_Grid]:
    for picture, start in pictures:
        if picture.mrope_grid is None:
            continue
        is_feature = np.asarray(picture.token_ids) == picture.feature_id
        rows, columns = picture.mrope_grid
        size = len(picture.times) * rows * columns
        for first in np.flatnonzero(is_feature)[::size].tolist():
            yield _Grid(start + first, rows, columns, picture.times)
