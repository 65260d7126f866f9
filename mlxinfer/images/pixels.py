"""Pixels of a picture: resized, cut into patches, and made the numbers that a tower reads.

The arithmetic is that of the PIL backend of transformers: resize in whole levels, then scale in
float64 to float32, then normalise in float32. A colour has 256 levels, so results are looked up.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .picture import Tile

if TYPE_CHECKING:
    from PIL.Image import Image

Levels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ColourScale:
    """How levels become numbers.

    Attributes:
        factor: times the level.
        mean, std: of each colour, taken off and divided by afterwards.
    """

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def table(self) -> NDArray[np.float32]:
        """(3, 256): the number of each colour's levels."""
        levels = (np.arange(256).astype(np.float64) * self.factor).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        numbers: NDArray[np.float32] = (levels - mean[:, None]) / std[:, None]
        return numbers


def resized(image: "Image", size: tuple[int, int], resample: int) -> Levels:
    """The levels (H, W, 3) of an RGB picture at a size of (height, width)."""
    from PIL.Image import Resampling

    height, width = size
    return np.asarray(image.resize((width, height), Resampling(resample)))


def cut(levels: Levels, side: int) -> Levels:
    """Patches (rows, columns, side, side, 3) of levels (H, W, 3)."""
    height, width, colours = levels.shape
    rows, columns = height // side, width // side
    return levels.reshape(rows, side, columns, side, colours).swapaxes(1, 2)


def colours_last(patches: Levels, scale: ColourScale) -> NDArray[np.float32]:
    """Rows (P, side * side * 3) of patches (..., side, side, 3), each row by row of pixels."""
    table, levels = scale.table(), patches.reshape(-1, *patches.shape[-3:])
    rows = np.empty(levels.shape, np.float32)  # (P, side, side, 3)
    for colour in range(3):
        rows[..., colour] = table[colour][levels[..., colour]]
    return rows.reshape(len(levels), -1)


def colours_first(patches: Levels, scale: ColourScale, *later: Levels) -> NDArray[np.float32]:
    """Rows (P, 3 * frames * side * side) of patches (..., side, side, 3), colour by colour."""
    table = scale.table()
    levels = [frame.reshape(-1, *frame.shape[-3:]) for frame in (patches, *later)]
    count, side = levels[0].shape[:2]
    rows = np.empty((count, 3, len(levels), side, side), np.float32)
    for number, frame in enumerate(levels):
        for colour in range(3):
            rows[:, colour, number] = table[colour][frame[..., colour]]
    return rows.reshape(count, -1)


def digest_of(processor: object, tiles: tuple[Tile, ...]) -> bytes:
    """16 bytes that tell prepared pictures apart.

    Args:
        processor: its repr names all that its patches depend on beside the pixels.
    """
    digest = hashlib.blake2b(repr(processor).encode(), digest_size=16)
    for tile in tiles:
        digest.update(repr((tile.grid, tile.num_features)).encode())
        digest.update(np.ascontiguousarray(tile.patches).data)
    return digest.digest()
