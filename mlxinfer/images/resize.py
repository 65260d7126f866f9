"""The size that each family gives a picture: pure functions of numbers of pixels.

All sizes are (height, width). Where transformers answers, its processors give the same sizes. A
limit that `max_tokens` sets is never exceeded, and no side rounds to 0.
"""

import math
from itertools import product
from typing import NamedTuple

Size = tuple[int, int]  # height, width

SOFT_TOKENS = (70, 140, 280, 560, 1120)  # what Gemma 4 was trained with


def fit_area(
    height: int,
    width: int,
    *,
    factor: int,
    low: int,
    high: int,
    cap: int,
    keeps_side: bool = False,
    frames: int = 1,
    step: int = 1,
) -> Size:
    """The size of a picture whose area is limited: Qwen's, and that of LFM2's whole pictures.

    Args:
        factor: both sides become multiples of it.
        low, high: pixels that the result has at least, and at most, in all frames. A very thin
            picture may have more, since its short side cannot be less than a factor.
        cap: pixels that no frame exceeds.
        keeps_side: a side that rounds to 0 counts as one factor before the area is looked at.
        frames: of a video that all get this size; a picture is one.
        step: frames count in multiples of it.
    """
    least = factor if keeps_side else 0
    rows = max(least, round(height / factor) * factor)
    columns = max(least, round(width / factor) * factor)
    times = round(frames / step) * step
    high = min(high, cap * frames)
    low = min(low, high)
    if times * rows * columns > high:
        return shrink(height, width, factor=factor, high=high, cap=cap, frames=frames)
    if times * rows * columns < low:
        scale = math.sqrt(low / (frames * height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    return _within(max(factor, rows), max(factor, columns), factor, cap)


def shrink(height: int, width: int, *, factor: int, high: int, cap: int, frames: int = 1) -> Size:
    """The size of about `high` pixels, in multiples of `factor`; same arguments as `fit_area`."""
    scale = math.sqrt(frames * height * width / high)
    rows = max(factor, math.floor(height / scale / factor) * factor)
    columns = max(factor, math.floor(width / scale / factor) * factor)
    return _within(rows, columns, factor, cap)


def _within(rows: int, columns: int, factor: int, cap: int) -> Size:
    if rows * columns <= cap:
        return rows, columns
    short = min(rows, columns)
    long = max(factor, cap // short // factor * factor)
    return (long, short) if rows > columns else (short, long)


def fit_edge(height: int, width: int, *, edge: int, factor: int, high: int) -> Size:
    """The size of a picture whose longer side is limited: Pixtral's. Small pictures stay small.

    Args:
        edge: pixels of the longer side, at most.
        factor: both sides are then rounded up to a multiple of it.
        high: pixels of the result, at most.
    """
    ratio = max(height / edge, width / edge)
    if ratio > 1:
        height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
    rows, columns = -(-height // factor) * factor, -(-width // factor) * factor
    if rows * columns > high:
        return shrink(height, width, factor=factor, high=high, cap=high)
    return rows, columns


def fit_soft_tokens(height: int, width: int, *, factor: int, limit: int) -> Size:
    """The largest size with the picture's ratio and at most `limit` squares: Gemma 4's.

    Small pictures grow.

    Args:
        factor: side of a square in pixels; both sides are rounded down to multiples of it.
        limit: squares at most.
    """
    scale = math.sqrt(limit * factor**2 / (height * width))
    rows = math.floor(scale * height / factor)
    columns = math.floor(scale * width / factor)
    if rows == 0:
        rows, columns = 1, min(max(1, math.floor(width / height)), limit)
    elif columns == 0:
        rows, columns = min(max(1, math.floor(height / width)), limit), 1
    return rows * factor, columns * factor


def soft_tokens(limit: int) -> int:
    """The largest number of tokens up to `limit` that Gemma 4 was trained with.

    Below the smallest of these it is the limit itself.
    """
    return max((count for count in SOFT_TOKENS if count <= limit), default=limit)


class TileGrid(NamedTuple):
    """Tiles that a large picture is cut into."""

    rows: int
    columns: int


def tile_grid(height: int, width: int, *, tile: int, low: int, high: int) -> TileGrid:
    """The grid of `low` to `high` tiles that is nearest to the picture's ratio: LFM2's.

    Args:
        tile: side of a tile in pixels.
        low, high: tiles at least, and at most.
    """
    sides = range(1, high + 1)
    grids = [TileGrid(r, c) for c, r in product(sides, sides) if low <= r * c <= high]
    # grids of one size stay in the order of their width, as transformers lists them
    grids.sort(key=lambda grid: grid.rows * grid.columns)
    best, least = TileGrid(1, 1), math.inf
    for grid in grids:
        distance = abs(width / height - grid.columns / grid.rows)
        roomy = width * height > 0.5 * tile**2 * grid.rows * grid.columns
        if distance < least or (distance == least and roomy):
            best, least = grid, distance
    return best
