"""Methods of text that overlook marks: a template decides as if there were none. Knows no jinja.

Marks are characters put into a text for whoever reads the rendering. What is made of such a text
keeps all of them, next to what they stood next to. Every method is linear in the text.
"""

import re
from collections.abc import Iterator
from typing import Any

_QUESTIONS = frozenset(("startswith", "endswith"))
_CUTS = frozenset(("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"))
_SPLITS = frozenset(("split", "rsplit"))


def without(value: Any, marks: str) -> Any:
    """Return a text without its marks, anything else as it is."""
    if isinstance(value, str):
        for mark in marks:
            value = value.replace(mark, "")
    return value


def nothing_but(marks: str, value: Any) -> bool:
    """Whether a value is a text of marks and nothing else."""
    return isinstance(value, str) and bool(value) and not value.strip(marks)


def overlooks(name: str, args: tuple[Any, ...]) -> bool:
    """Whether `call_overlooking` knows a method with these arguments."""
    separated = name in _SPLITS and bool(args) and isinstance(args[0], str)
    return separated or name in _QUESTIONS or name in _CUTS


def call_overlooking(marks: str, text: str, name: str, args: tuple[Any, ...]) -> Any:
    """Return what a method makes of the text without its marks, with the marks in it."""
    plain = without(text, marks)
    args = tuple(without(arg, marks) for arg in args)
    result = getattr(plain, name)(*args)
    if name in _QUESTIONS:
        return result
    if name in _SPLITS:
        return list(_split(text, [len(piece) for piece in result], len(args[0]), marks))
    start = len(plain) - len(result)
    if name in ("rstrip", "removesuffix"):
        start = 0
    elif name == "strip":
        start = len(plain) - len(plain.lstrip(*args))
    begin = _after(start, text, 0, marks)
    end = _after(len(result), text, begin, marks)
    return _marks_in(text[:begin], marks) + text[begin:end] + _marks_in(text[end:], marks)


def _split(text: str, lengths: list[int], gap: int, marks: str) -> Iterator[str]:
    """Yield pieces that have these lengths, and gaps between them, where marks do not count."""
    begin, held = 0, ""
    for length in lengths[:-1]:
        end = _after(length + 1, text, begin, marks) - 1  # at the first character of the gap
        yield held + text[begin:end]
        begin = _after(gap, text, end, marks)
        held = _marks_in(text[end:begin], marks)
    yield held + text[begin:]


def _after(count: int, text: str, begin: int, marks: str) -> int:
    """Return where so many characters have passed since `begin`, marks aside."""
    seen, end = begin, begin + count
    while seen < end:
        found = sum(text.count(mark, seen, end) for mark in marks)
        seen, end = end, end + found
    return end


def _marks_in(text: str, marks: str) -> str:
    return re.sub(f"[^{re.escape(marks)}]+", "", text)
