"""Shapes without a name: the model is to say that it does not know them. No mlx.

Training draws those of TAUGHT, of which most are never twice the same. Those of HELD_OUT are drawn
by `evaluate` only.
"""

from collections.abc import Callable
from math import cos, pi, sin
from random import Random
from typing import NamedTuple

Point = tuple[float, float]


class Part(NamedTuple):
    """A filled polygon, or a line.

    Attributes:
        points: in a circle of radius 1 around (0, 0); y goes down.
        line: its width; 0: the polygon is filled.
    """

    points: list[Point]
    line: float = 0.0


Draw = Callable[[Random], list[Part]]


def _round(x: float, y: float, width: float, height: float, first: float = 0.0) -> Part:
    """An ellipse, from the angle `first` on."""
    turns = [first + (2 * pi - first) * i / 40 for i in range(41)]
    return Part([(x + width * cos(t), y + height * sin(t)) for t in turns])


def _box(left: float, top: float, right: float, bottom: float) -> Part:
    return Part([(left, top), (right, top), (right, bottom), (left, bottom)])


def _turned(parts: list[Part], turn: float) -> list[Part]:
    c, s = cos(turn), sin(turn)
    return [Part([(c * x - s * y, s * x + c * y) for x, y in p.points], p.line) for p in parts]


def _blot(rng: Random) -> list[Part]:
    """Any shape: no two are the same."""
    count = rng.randint(5, 12)
    far = [rng.uniform(0.25, 1.0) for _ in range(count)]
    first = rng.uniform(0, 2 * pi)
    turns = [first + 2 * pi * i / count for i in range(count)]
    return [Part([(r * cos(t), r * sin(t)) for r, t in zip(far, turns, strict=True)])]


def _boxes(rng: Random) -> list[Part]:
    """A thing built of two to four boxes, of which each covers the middle."""

    def far() -> float:
        return rng.uniform(0.1, 0.9)

    return [_box(-far(), -far(), far(), far()) for _ in range(rng.randint(2, 4))]


def _pile(rng: Random) -> list[Part]:
    """A thing built of boxes, discs and corners: two to four of them."""
    parts = []
    for _ in range(rng.randint(2, 4)):
        r = rng.uniform(0.25, 0.6)
        x, y = rng.uniform(-r, r) / 2, rng.uniform(-r, r) / 2
        kind = rng.random()
        if kind < 0.35:
            parts.append(_round(x, y, r, r * rng.uniform(0.4, 1)))
        elif kind < 0.7:
            parts.append(_box(x - r, y - r * rng.uniform(0.3, 1), x + r, y + r * 0.6))
        else:
            parts.append(Part([(x - r, y + r), (x, y - r), (x + r, y + r)]))
    return parts


def _lines(rng: Random) -> list[Part]:
    """A scribble, or a figure of sticks."""
    width = rng.uniform(0.06, 0.2)
    if rng.random() < 0.5:
        points = [
            (rng.uniform(-0.9, 0.9), rng.uniform(-0.9, 0.9)) for _ in range(rng.randint(2, 6))
        ]
        return [Part(points, width)]
    arms, legs = rng.uniform(-0.3, 0.3), rng.uniform(0.3, 0.5)
    return [
        _round(0, -0.7, 0.25, 0.25),
        Part([(0, -0.5), (0, 0.3)], width),
        Part([(-0.5, -0.2 + arms), (0, -0.2), (0.5, -0.2 - arms)], width),
        Part([(-legs, 0.95), (0, 0.3), (legs, 0.95)], width),
    ]


def _cross(rng: Random) -> list[Part]:
    arm = rng.uniform(0.18, 0.38)
    parts = [_box(-arm, -0.95, arm, 0.95), _box(-0.95, -arm, 0.95, arm)]
    return _turned(parts, rng.choice((0.0, pi / 4)))


def _heart(rng: Random) -> list[Part]:
    turns = [2 * pi * i / 40 for i in range(40)]
    points = [
        (sin(t) ** 3, -(13 * cos(t) - 5 * cos(2 * t) - 2 * cos(3 * t) - cos(4 * t)) / 17)
        for t in turns
    ]
    return [Part([(x * rng.uniform(0.98, 1), y) for x, y in points])]


def _arrow(rng: Random) -> list[Part]:
    wide, head = rng.uniform(0.12, 0.25), rng.uniform(0.45, 0.7)
    parts = [_box(-1, -wide, 0.2, wide), Part([(0.1, -head), (1, 0), (0.1, head)])]
    return _turned(parts, rng.choice((0, pi / 2, pi, -pi / 2)))


def _crescent(rng: Random) -> list[Part]:
    deep = rng.uniform(0.35, 0.7)
    outer = [(sin(pi * i / 30), -cos(pi * i / 30)) for i in range(31)]
    inner = [(deep * sin(pi * i / 30), -cos(pi * i / 30)) for i in range(30, -1, -1)]
    return _turned([Part(outer + inner)], rng.uniform(0, 2 * pi))


def _oval(rng: Random) -> list[Part]:
    return _turned([_round(0, 0, 1, rng.uniform(0.3, 0.6))], rng.uniform(0, pi))


def _bar(rng: Random) -> list[Part]:
    high = rng.uniform(0.15, 0.5)
    return _turned([_box(-0.95, -high, 0.95, high)], rng.choice((0, 0, pi / 2, rng.uniform(0, pi))))


def _polygon(rng: Random) -> list[Part]:
    count, first = rng.choice((5, 6)), rng.choice((0, -pi / 2))
    turns = [first + 2 * pi * i / count for i in range(count)]
    return [Part([(cos(t), sin(t)) for t in turns])]


def _house(rng: Random) -> list[Part]:
    wide, roof = rng.uniform(0.5, 0.7), rng.uniform(0.7, 0.95)
    parts = [_box(-wide, -0.2, wide, 0.85), Part([(-roof, -0.2), (0, -0.95), (roof, -0.2)])]
    if rng.random() < 0.6:
        parts.append(_box(-0.15, 0.3, 0.15, 0.85))
    return parts


def _tree(rng: Random) -> list[Part]:
    trunk = _box(-0.12, 0.2, 0.12, 0.95)
    if rng.random() < 0.5:
        return [trunk, _round(0, -0.3, rng.uniform(0.45, 0.65), 0.6)]
    return [trunk, Part([(-0.6, 0.3), (0, -0.95), (0.6, 0.3)])]


def _flower(rng: Random) -> list[Part]:
    count, far = rng.randint(5, 8), rng.uniform(0.25, 0.33)
    turns = [2 * pi * i / count for i in range(count)]
    petals = [_round(0.6 * cos(t), 0.6 * sin(t), far, far) for t in turns]
    return [*petals, _round(0, 0, 0.35, 0.35)]


def _fish(rng: Random) -> list[Part]:
    high = rng.uniform(0.35, 0.5)
    return [_round(-0.2, 0, 0.7, high), Part([(0.3, 0), (0.95, -0.5), (0.95, 0.5)])]


def _bolt(_: Random) -> list[Part]:
    return [Part([(0.2, -1), (-0.5, 0.15), (-0.05, 0.15), (-0.25, 1), (0.5, -0.25), (0.05, -0.25)])]


def _cup(_: Random) -> list[Part]:
    handle = [(0.4, -0.4), (0.85, -0.3), (0.85, 0.2), (0.35, 0.4)]
    return [Part([(-0.7, -0.6), (0.5, -0.6), (0.35, 0.8), (-0.55, 0.8)]), Part(handle, 0.14)]


def _car(_: Random) -> list[Part]:
    body = [_box(-0.95, -0.05, 0.95, 0.4), Part([(-0.5, 0), (-0.3, -0.5), (0.35, -0.5), (0.6, 0)])]
    return [*body, _round(-0.5, 0.45, 0.24, 0.24), _round(0.5, 0.45, 0.24, 0.24)]


def _key(_: Random) -> list[Part]:
    teeth = [_box(0.45, 0, 0.57, 0.35), _box(0.75, 0, 0.87, 0.35)]
    return [_round(-0.55, 0, 0.4, 0.4), _box(-0.3, -0.09, 0.95, 0.09), *teeth]


def _moon(_: Random) -> list[Part]:
    outer = [(sin(pi * i / 30), -cos(pi * i / 30)) for i in range(31)]
    return [Part(outer + [(0.55 * x, y) for x, y in reversed(outer)])]


TAUGHT: dict[str, Draw] = {
    "blot": _blot, "boxes": _boxes, "pile": _pile, "lines": _lines, "cross": _cross,
    "heart": _heart, "arrow": _arrow, "crescent": _crescent, "oval": _oval, "bar": _bar,
    "polygon": _polygon, "house": _house, "tree": _tree, "flower": _flower,
}  # fmt: skip
HELD_OUT: dict[str, Draw] = {
    "fish": _fish, "bolt": _bolt, "cup": _cup, "car": _car, "key": _key, "moon": _moon,
}  # fmt: skip
