"""Batches for training: drawings as patches, conversations about them as tokens. No mlx."""

from functools import cache
from math import exp
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from mlxinfer.images.pixels import ColourScale
from mlxinfer.images.qwen import QwenProcessor

from ..tokenizer import END, START
from .drawings import COLOURS, SHAPES, WORDS, Scene, draw, draw_scene
from .model import MERGE, PATCH, patch_places, patch_turn, stretch, text_turn
from .questions import ask
from .tokenizer import BEGIN, CLOSE, PAD

LOW, HIGH = 12_288, 16_384  # pixels of a resized picture
PICTURES = 8  # of a batch
TURNS = {1: 2, 2: 1}  # questions about a picture by the pictures of a row
ROWS = {1: 80, 2: 96}  # tokens of a row
COUNTED = {1: 40, 2: 40}  # of these, tokens of answers
GRIDS = {(4, 4), (3, 4), (4, 3), (3, 5), (5, 3)}  # rows and columns of features
PATCH_LABELS = len(SHAPES) + len(COLOURS) + 2  # and letters, and shapes without a name
LABELS = len(SHAPES) * len(COLOURS) + len(WORDS) + 3  # and others: shapes, words; and photos
SIDE = PATCH * MERGE

Grid = tuple[int, int]
Arrays = dict[str, NDArray[Any]]


class Shown(NamedTuple):
    """A scene with its picture."""

    scene: Scene
    image: Image.Image


@cache
def processor() -> QwenProcessor:
    """What makes pictures ready, as it does for the model that ships."""
    half = np.full(3, 0.5, np.float32)
    return QwenProcessor(
        placeholder_id=0,
        feature_id=0,
        resample=3,
        scale=ColourScale(1 / 255, half, half),
        patch=PATCH,
        merge=MERGE,
        frames=2,
        low=LOW,
        high=HIGH,
    )


def canvas(rng: Random) -> tuple[int, int]:
    """A random width and height in pixels."""
    side = rng.randint(112, 160)
    if rng.random() < 0.4:
        return side, side
    ratio = exp(rng.uniform(-0.55, 0.6))
    return max(side, round(side * ratio)), max(side, round(side / ratio))


def grid_of(size: tuple[int, int]) -> Grid:
    """Rows and columns of features of a picture of this width and height."""
    height, width = processor().fit(Image.new("1", size), 1 << 20)
    return height // SIDE, width // SIDE


def shown(rng: Random, grid: Grid | None = None, *, crowded: bool = False) -> Shown:
    """A random scene and its picture; with a grid, of a size that has it."""
    size = canvas(rng)
    while grid_of(size) not in ({grid} if grid else GRIDS):
        size = canvas(rng)
    scene = draw_scene(rng, crowded=crowded)
    return Shown(scene, draw(scene, size, rng))


def patches_of(image: Image.Image) -> NDArray[np.float32]:
    """(P, 3 * PATCH * PATCH) of a picture; both frames are alike, so one is left."""
    ready = processor()
    tile = ready.tile([ready.blocks(image, ready.fit(image, 1 << 20))])
    return tile.patches.reshape(len(tile.patches), 3, 2, -1)[:, :, 0].reshape(-1, 3 * PATCH**2)


def labels_of(scene: Scene, grid: Grid) -> NDArray[np.float32]:
    """(features, LABELS) what has its centre in each."""
    rows, columns = grid
    labels = np.zeros((rows, columns, LABELS), np.float32)
    colours, words = list(COLOURS), len(SHAPES) * len(COLOURS)
    for thing in scene.things:
        label = words + len(WORDS)
        if thing.shape in SHAPES:
            label = SHAPES.index(thing.shape) * len(colours) + colours.index(thing.colour)
        labels[int(thing.y * rows), int(thing.x * columns), label] = 1
    if scene.word:
        label = words + (WORDS.index(scene.word) if scene.word in WORDS else len(WORDS) + 1)
        labels[int(scene.y * rows), int(scene.x * columns), label] = 1
    labels[:, :, -1] = scene.is_photo
    return labels.reshape(-1, LABELS)


def patch_labels_of(scene: Scene, grid: Grid) -> NDArray[np.float32]:
    """(P, PATCH_LABELS) what covers the centre of each patch, nearly."""
    rows, columns = grid[0] * MERGE, grid[1] * MERGE
    centres = (patch_places(rows, columns) + 0.5) / (rows, columns)
    labels = np.zeros((len(centres), PATCH_LABELS), np.float32)
    short = min(rows, columns)
    for thing in scene.things:
        away = (centres - (thing.y, thing.x)) * (rows / short, columns / short)
        inside = (away**2).sum(1) < (0.9 * thing.radius) ** 2
        labels[inside, SHAPES.index(thing.shape) if thing.shape in SHAPES else -2] = 1
        if thing.colour:
            labels[inside, len(SHAPES) + list(COLOURS).index(thing.colour)] = 1
    if scene.word:
        away = np.abs(centres - (scene.y, scene.x))
        labels[(away < (0.08, scene.length / 2)).all(1), -1] = 1
    return labels


class Row:
    """One row of tokens, with the features of its pictures."""

    def __init__(self, tokenizer: Tokenizer, grid: Grid) -> None:
        self.tokenizer, self.grid = tokenizer, grid
        self.ids: list[int] = []
        self.source: list[int] = []
        self.positions: list[tuple[int, int, int]] = []
        self.at: list[int] = []
        self.next_position = 0

    def text(self, text: str, *, counted: bool = False) -> None:
        """Add text; `counted` tokens are learnt."""
        for token in self.tokenizer.encode(text).ids:
            if counted:
                self.at.append(len(self.ids))
            self._add(token, -1, (self.next_position,) * 3)
            self.next_position += 1

    def picture(self, number: int) -> None:
        """Add the picture of this number in the batch."""
        rows, columns = self.grid
        start, pad = self.next_position, self.tokenizer.token_to_id(PAD)
        self.text(BEGIN)
        start = self.next_position
        for cell in range(rows * columns):
            place = start, start + cell // columns, start + cell % columns
            self._add(pad, number * rows * columns + cell, place)
        self.next_position = start + max(rows, columns)
        self.text(CLOSE)

    def turn(self, question: str, answer: str, picture: int | None = None) -> None:
        """Add a question, behind a picture if it has one, and its answer."""
        self.text(f"{START}user\n")
        if picture is not None:
            self.picture(picture)
        self.text(f"{question}{END}\n{START}assistant\n")
        self.text(f"{answer}{END}", counted=True)
        self.text("\n")

    def _add(self, token: int, source: int, position: tuple[int, int, int]) -> None:
        self.ids.append(token)
        self.source.append(source)
        self.positions.append(position)


def batch(tokenizer: Tokenizer, seed: int, step: int, *, crowded: bool = False) -> Arrays:
    """Return the batch of one step; the same seed and step always give the same one.

    Pictures of a `crowded` one have many shapes, and nothing else is different.
    """
    rng = Random(f"vision/{seed}/{step}")
    first = shown(rng, crowded=crowded)
    grid = grid_of(first.image.size)
    scenes = [first, *(shown(rng, grid, crowded=crowded) for _ in range(PICTURES - 1))]
    pictures = 2 if step % 4 == 3 else 1
    rows = [
        _row(tokenizer, grid, scenes, first, pictures, rng)
        for first in range(0, PICTURES, pictures)
    ]
    return {**_seen(scenes, grid), **_stacked(rows, ROWS[pictures], COUNTED[pictures])}


def _row(
    tokenizer: Tokenizer, grid: Grid, scenes: list[Shown], first: int, pictures: int, rng: Random
) -> Row:
    row = Row(tokenizer, grid)
    for number in range(first, first + pictures):
        for turn in range(TURNS[pictures]):
            asked = ask(scenes[number].scene, rng)
            row.turn(asked.question, asked.answer, None if turn else number)
    return row


def _seen(scenes: list[Shown], grid: Grid) -> Arrays:
    rows, columns = grid[0] * MERGE, grid[1] * MERGE
    cosines, sines = patch_turn(rows, columns)
    return {
        "patches": np.stack([patches_of(shown.image) for shown in scenes]),
        "labels": np.stack([labels_of(shown.scene, grid) for shown in scenes]),
        "patch_labels": np.stack([patch_labels_of(shown.scene, grid) for shown in scenes]),
        "places": stretch(rows, columns),
        "patch_cos": cosines,
        "patch_sin": sines,
    }


def _stacked(rows: list[Row], length: int, counted: int) -> Arrays:
    """Rows of equal length; what is longer is cut."""
    ids = np.zeros((len(rows), length), np.int32)
    source = np.full((len(rows), length), -1, np.int32)
    positions = np.zeros((3, len(rows), length), np.int32)
    at = np.ones((len(rows), counted), np.int32)
    weights = np.zeros((len(rows), counted), np.float32)
    for index, row in enumerate(rows):
        size = min(length, len(row.ids))
        ids[index, :size] = row.ids[:size]
        source[index, :size] = row.source[:size]
        positions[:, index, :size] = np.array(row.positions[:size]).T
        learnt = [place for place in row.at if place < length][:counted]
        at[index, : len(learnt)] = learnt
        weights[index, : len(learnt)] = 1
    cosines, sines = text_turn(positions)
    wanted = np.take_along_axis(ids, at, axis=1)
    turn = {"text_cos": cosines, "text_sin": sines}
    return {"ids": ids, "source": source, "at": at, "wanted": wanted, "weights": weights, **turn}
