"""A tower of random numbers over the tiny models, and pictures for it."""

from collections.abc import Generator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np
from engine.harness import model_of

from mlxinfer.cache_specs import KVSpec
from mlxinfer.images import Picture, PlacedPicture, Tile
from mlxinfer.models.decoder import Model
from mlxinfer.models.towers import Features

ROW = 6  # numbers of a patch
FEATURE, BREAK = 7, 8  # token ids
Parts = list[list[int] | Picture]


class RandomTower:
    """Features that follow from the patches of a tile alone, through random matrices.

    Args:
        hidden: of the text model.
        num_deep: layers after which features are added.

    Attributes:
        passes: digest of the patches of each tile that was run to its end.
        num_open: passes that were begun and not ended.
        fails: what a pass raises; None: it does not.
    """

    def __init__(self, hidden: int, num_deep: int = 0) -> None:
        self.width, self.num_deep = hidden * (1 + num_deep), num_deep
        self.passes: list[bytes] = []
        self.num_open = 0
        self.fails: Exception | None = None
        rng = np.random.default_rng(hidden)
        self._matrix = mx.array(rng.normal(size=(ROW, self.width)).astype(np.float32) * 0.4)

    def run(self, tile: Tile) -> Generator[mx.array, None, Features]:
        self.num_open += 1
        try:
            x = mx.array(tile.patches)
            for _ in range(3):
                x = mx.sin(x * 1.5)
                yield x
            if self.fails is not None:
                raise self.fails
        finally:
            self.num_open -= 1
        self.passes.append(blake2b(tile.patches.tobytes()).digest())
        vectors, *deep = mx.split(x @ self._matrix, 1 + self.num_deep, axis=1)
        return Features(vectors, tuple(deep))

    def arrays(self) -> list[mx.array]:
        return [self._matrix]


def run_tower(tower: Any, tile: Tile) -> Features:
    """The features of a tile, evaluated piece by piece as the engine does it."""
    pieces = tower.run(tile)
    while True:
        try:
            mx.eval(next(pieces))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def tile(seed: int, count: int) -> Tile:
    """A tile of random patches, one for each feature."""
    rng = np.random.default_rng((seed, count))
    return Tile(rng.normal(size=(count, ROW)).astype(np.float32), (1, 1, count), count)


def picture(
    seed: int,
    rows: int = 1,
    columns: int = 4,
    *,
    breaks: bool = False,
    num_tiles: int = 1,
    mrope: bool = False,
    sees_itself: bool = False,
) -> Picture:
    """A picture of rows and columns of features; with `breaks` a token of text ends each row."""
    counts = [rows * columns // num_tiles] * num_tiles
    counts[0] += rows * columns - sum(counts)
    tiles = tuple([tile(seed + 1000 * i, count) for i, count in enumerate(counts)])
    ids = [*[FEATURE] * columns, *[BREAK] * breaks] * rows
    said = repr((seed, rows, columns, breaks, num_tiles, mrope, sees_itself))
    return Picture(
        tiles,
        tuple(ids),
        FEATURE,
        blake2b(said.encode(), digest_size=16).digest(),
        (rows, columns) if mrope and not breaks else None,
        sees_itself,
    )


def placed(*parts: Sequence[int] | Picture) -> tuple[list[int], tuple[PlacedPicture, ...]]:
    """A prompt of texts and pictures in this order, and where the pictures stand."""
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, Picture):
            pictures.append(PlacedPicture(part, len(ids)))
            ids += part.token_ids
        else:
            ids += part
    return ids, tuple(pictures)


def until(parts: Parts, length: int) -> Parts:
    """The first `length` tokens of a prompt; a picture that would be cut, and the rest, are not."""
    beginning: Parts = []
    for part in parts:
        if isinstance(part, Picture):
            if len(part.token_ids) > length:
                break
            beginning.append(part)
            length -= len(part.token_ids)
        else:
            beginning.append(part[:length])
            length -= len(beginning[-1])
    return beginning


def with_tower(model: Any, num_deep: int = 0) -> Any:
    """The same model with a tower; every tower of a size is the same."""
    seeing = copy(model)
    seeing.tower = RandomTower(model.config.hidden_size, num_deep)
    return seeing


def with_spans(model: Any) -> Any:
    """The same model, of which all attention layers see spans."""
    seeing = copy(model)
    seeing.cache_specs = [
        replace(spec, sees_spans=True) if isinstance(spec, KVSpec) else spec
        for spec in model.cache_specs
    ]
    return seeing


@cache
def seeing(case: str, *, spans: bool = False, num_deep: int = 0) -> Model:
    """A tiny model with a tower of its own; with `spans` all attention layers see spans."""
    model: Model = with_tower(model_of(case), num_deep)
    return with_spans(model) if spans else model  # type: ignore[no-any-return]


def tower_of(model: Model) -> RandomTower:
    """The tower of a model that `seeing` made."""
    assert isinstance(model.tower, RandomTower)
    return model.tower
