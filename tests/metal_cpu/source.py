"""A kernel's text: its parts, and the headers that it includes put in place. Transforms nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

SHIM = Path(__file__).parent / "shim"  # headers of Metal's library, and of MLX's that need others
MLX_HEADERS = Path(mx.__file__).parent / "include"

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')


@dataclass(frozen=True, slots=True)
class Part:
    """Some text and the name of the file that it is from."""

    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel function as a compiler gets it.

    Args:
        function: its name.
        parts: its text, in order.
        instance: its template arguments, separated by commas; empty: not a template.
        constants: (index, value) of function constants; of those not named the value is 0.
    """

    function: str
    parts: tuple[Part, ...]
    instance: str = ""
    constants: tuple[tuple[int, int], ...] = ()


def flattened(parts: tuple[Part, ...], *, behind: tuple[Part, ...] = ()) -> str:
    """All text with each quoted include in its place, once; others are left to the compiler.

    `#line` says which file each line is of. What the parts `behind` include is there already.
    """
    seen: set[Path] = set()
    for part in behind:
        list(_lines(part, seen))
    return "\n".join(line for part in parts for line in _lines(part, seen)) + "\n"


def stretches(text: str) -> list[str]:
    """What `flattened` made, in pieces that are of one file each; most kernels share most."""
    return re.split(r"^(?=#line )", text, flags=re.MULTILINE)


def _lines(part: Part, seen: set[Path]) -> Iterator[str]:
    yield f'#line 1 "{part.file}"'
    for number, line in enumerate(part.text.splitlines(), start=1):
        match = _INCLUDE.match(line)
        path = match and _header(match[1])
        if not path:
            yield "" if line.lstrip().startswith("#pragma once") else line
            continue
        if path not in seen:
            seen.add(path)
            yield from _lines(Part(path.name, path.read_text()), seen)
        yield f'#line {number + 1} "{part.file}"'


@cache
def _header(name: str) -> Path | None:
    """Where an included header is: ours come first."""
    places = (folder / name for folder in (SHIM, MLX_HEADERS))
    return next((place for place in places if place.is_file()), None)
