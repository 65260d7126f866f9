"""Drawings by a program: a scene of shapes and words, and its picture. Needs Pillow; no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import cos, pi, sin
from random import Random
from string import ascii_uppercase
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .others import HELD_OUT, TAUGHT, Part

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": ((255, 0, 0), (220, 30, 40)),
    "yellow": ((255, 255, 0), (250, 215, 30)),
    "green": ((0, 128, 0), (0, 200, 0)),
    "blue": ((0, 0, 255), (30, 100, 230)),
    "black": ((0, 0, 0), (40, 40, 40)),
}
NAMELESS = ((255, 140, 0), (150, 60, 180), (255, 120, 190), (130, 80, 40), (130, 130, 130))
WORDS = ("YES", "NO", "STOP", "HELLO")
OTHERS_SHARE = 0.3  # of the scenes with shapes: some have no name; of words: any letters
MOST = 5  # shapes of a drawing
FINE = 2  # a drawing is made larger by this and then reduced, so that its edges are smooth
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape of a drawing.

    Attributes:
        shape: one of SHAPES, or of `others.py`, which the model does not know.
        colour: one of COLOURS; "": it has several, or one without a name.
        x, y: its centre, from 0 to 1 from the left and from the top.
        radius: of the circle around it, in shares of the shorter side.
    """

    shape: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows.

    Attributes:
        things: its shapes.
        word: printed letters; "": there are none.
        x, y: the centre of the word, in the units of a thing.
        length: of the word, from 0 to 1 of the width.
        is_photo: it is no drawing, and shows nothing that has a name.
    """

    things: tuple[Thing, ...] = ()
    word: str = ""
    x: float = 0.5
    y: float = 0.5
    length: float = 0.0
    is_photo: bool = False


def draw_scene(
    rng: Random, *, crowded: bool = False, others: Sequence[str] = tuple(TAUGHT)
) -> Scene:
    """Return a random scene; shapes and word do not cover each other in a square picture.

    Args:
        rng: chooses.
        crowded: the scene has more shapes, from which a tower learns sooner.
        others: shapes without a name, of which some scenes have some; others have a word that is
            none of WORDS. (): there are neither.
    """
    kind = rng.random()
    if kind < 0.04:
        return Scene(is_photo=True)
    if kind < 0.055:
        return Scene()
    scene = Scene()
    if rng.random() < 0.45:
        scene = _with_word(rng, unread=bool(others) and rng.random() < OTHERS_SHARE)
    if crowded:
        shapes = (*SHAPES, *SHAPES, rng.choice(others), rng.choice(others))
        kinds = [(rng.choice(shapes), rng.choice(list(COLOURS))) for _ in range(7)]
        return _placed(scene, kinds, rng)
    groups = rng.choice((0, 0, 1, 2)) if scene.word else rng.choice((1, 1, 1, 2, 2, 3))
    wanted: list[tuple[str, str]] = []
    for _ in range(groups):
        count = rng.choice((1, 1, 1, 2, 2, 3, 4, 5))
        wanted += [(rng.choice(SHAPES), rng.choice(list(COLOURS)))] * count
    wanted = wanted[:MOST]
    if wanted and others and rng.random() < OTHERS_SHARE:
        count = rng.choice((1, 1, 1, 2, len(wanted)))
        wanted[:count] = [(rng.choice(others), rng.choice(("", *COLOURS))) for _ in wanted[:count]]
    return _placed(scene, wanted, rng)


def _placed(scene: Scene, wanted: list[tuple[str, str]], rng: Random) -> Scene:
    largest = 0.3 if len(wanted) == 1 and not scene.word else 0.19 if len(wanted) < 4 else 0.15
    placed: tuple[Thing, ...] = ()
    for shape, colour in wanted:
        radius = rng.uniform(0.12, largest)
        for _ in range(40):
            x, y = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
            thing = Thing(shape, colour, x, y, radius)
            if _is_free(thing, placed, scene):
                placed = (*placed, thing)
                break
    return replace(scene, things=placed)


def draw(scene: Scene, size: tuple[int, int], rng: Random) -> Image.Image:
    """Return a picture of the scene.

    Args:
        scene: what it shows.
        size: width and height in pixels.
        rng: chooses tones, filling, turns and letter case.
    """
    if scene.is_photo:
        return _texture(size, rng)
    width, height = size[0] * FINE, size[1] * FINE
    ground = rng.choice((255, 255, 250, rng.randint(225, 255)))
    tint = rng.choice((0, 0, rng.randint(0, 25)))
    paper = (ground - rng.choice((0, tint)), ground - rng.choice((0, tint)), ground)
    image = Image.new("RGB", (width, height), paper)
    pencil = ImageDraw.Draw(image)
    for thing in scene.things:
        _draw_thing(pencil, thing, (width, height), rng)
    if scene.word:
        _draw_word(pencil, scene, (width, height), rng)
    return image.reduce(FINE)


def _with_word(rng: Random, *, unread: bool) -> Scene:
    word = rng.choice(WORDS)
    if unread:
        word = "".join(rng.choices(ascii_uppercase, k=rng.randint(2, 6)))
    length = min(0.9, max(2, len(word)) * rng.uniform(0.14, 0.22))
    x = rng.uniform(length / 2 + 0.02, 0.98 - length / 2)
    return Scene(
        word=word, x=x, y=rng.choice((0.15, 0.5, 0.85, rng.uniform(0.15, 0.85))), length=length
    )


def _is_free(thing: Thing, placed: tuple[Thing, ...], scene: Scene) -> bool:
    if scene.word:
        away = (
            max(abs(thing.x - scene.x) - scene.length / 2, 0),
            max(abs(thing.y - scene.y) - 0.13, 0),
        )
        if away[0] ** 2 + away[1] ** 2 < thing.radius**2:
            return False
    return all(
        (thing.x - other.x) ** 2 + (thing.y - other.y) ** 2
        > (1.05 * (thing.radius + other.radius)) ** 2
        for other in placed
    )


def _tone(colour: str, rng: Random) -> Colour:
    tones = COLOURS[colour] if colour else NAMELESS
    near = [max(0, min(255, level + rng.randint(-12, 12))) for level in rng.choice(tones)]
    return near[0], near[1], near[2]


def _draw_thing(pencil: Any, thing: Thing, size: tuple[int, int], rng: Random) -> None:
    x, y, radius = thing.x * size[0], thing.y * size[1], thing.radius * min(size)
    if thing.shape in SHAPES:
        points = _corners(thing.shape, rng.gauss(0, 0.05))
        parts = [Part(points)]
    else:
        parts = {**TAUGHT, **HELD_OUT}[thing.shape](rng)
    tones = [_tone(thing.colour, rng)] * len(parts)
    if not thing.colour:
        tones = [_tone(rng.choice(("", *COLOURS)), rng) for _ in parts]
        tones = tones if rng.random() < 0.7 else tones[:1] * len(parts)
    for part, tone in zip(parts, tones, strict=True):
        at = [(x + radius * across, y + radius * down) for across, down in part.points]
        if part.line:
            pencil.line(at, fill=tone, width=max(1, round(part.line * radius)), joint="curve")
        else:
            pencil.polygon(at, fill=tone)


def _corners(shape: str, turn: float) -> list[tuple[float, float]]:
    """Corners in a circle of radius 1 around (0, 0); y goes down."""
    count = {"circle": 48, "square": 4, "triangle": 3, "star": 10}[shape]
    first = pi / 4 if shape == "square" else -pi / 2
    reach = [1.0, 0.42] * 5 if shape == "star" else [1.0] * count
    points = [
        (far * cos(first + 2 * pi * i / count), far * sin(first + 2 * pi * i / count))
        for i, far in enumerate(reach)
    ]
    c, s = cos(turn), sin(turn)
    return [(c * x - s * y, s * x + c * y) for x, y in points]


@lru_cache(maxsize=512)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def _draw_word(pencil: Any, scene: Scene, size: tuple[int, int], rng: Random) -> None:
    text = scene.word
    wanted = scene.length * size[0]
    high = 100 * wanted / max(1.0, _font(100).getlength(text))
    high = min(high, 0.3 * size[1])
    tone = _tone(rng.choice(("black", "black", rng.choice(list(COLOURS)))), rng)
    at = scene.x * size[0], scene.y * size[1]
    pencil.text(at, text, fill=tone, font=_font(max(8, round(high))), anchor="mm")


def _texture(size: tuple[int, int], rng: Random) -> Image.Image:
    """Blots and shades of all sizes, as photographs have them."""
    noise = np.random.default_rng(rng.getrandbits(64))
    total = np.zeros((size[1], size[0], 3), np.float32)
    for side in (2, 3, 5, 9, 17, 33)[: rng.randint(3, 6)]:
        blots = noise.integers(0, 256, (side, side, 3), dtype=np.uint8)
        shades = Image.fromarray(blots).resize(size, Image.Resampling.BICUBIC)
        total += (np.asarray(shades, np.float32) - 128) * 1.6 / side**0.35
    level = rng.uniform(90, 170)
    return Image.fromarray((total * rng.uniform(0.4, 1) + level).clip(0, 255).astype(np.uint8))
