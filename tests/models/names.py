"""Lists of tensors in short: `model.layers.{0-3,5}.mlp.experts.{0-7}.up_proj.weight`. No mlx.

One entry stands for all combinations of its numbers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product

Shape = tuple[int, ...]
Short = dict[str, Sequence[int]]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_RANGES = re.compile(r"\{([\d,-]+)\}")


def expanded(short: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    """Every tensor's name and shape."""
    return {
        _RANGES.sub("{}", name).format(*numbers): tuple(shape)
        for name, shape in short.items()
        for numbers in product(*map(_numbers, _RANGES.findall(name)))
    }


def shortened(shapes: Mapping[str, Sequence[int]]) -> Short:
    """The shortest list of this kind: entries agree in shape and in all but their numbers."""
    kinds: dict[tuple[str, Shape], list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        numbers = tuple(map(int, _NUMBER.findall(name)))
        kinds.setdefault((_NUMBER.sub("{}", name), tuple(shape)), []).append(numbers)
    short: Short = {}
    for (form, shape), tuples in kinds.items():
        for ranges in _products(tuples):
            short[form.format(*("{" + one + "}" for one in ranges))] = list(shape)
    return short


def _products(tuples: Sequence[tuple[int, ...]]) -> list[list[str]]:
    """Ranges of each number; their combinations are these; as few as a common tail allows."""
    if not tuples[0]:
        return [[]]
    tails: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, rest in groupby(sorted(tuples), key=lambda numbers: numbers[0]):
        tails.setdefault(tuple(numbers[1:] for numbers in rest), []).append(first)
    return [
        [_ranges(firsts), *rest] for tail, firsts in tails.items() for rest in _products(list(tail))
    ]


def _ranges(numbers: Iterable[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _numbers(ranges: str) -> list[int]:
    ends = [[int(end) for end in part.split("-")] for part in ranges.split(",")]
    return [number for part in ends for number in range(part[0], part[-1] + 1)]
