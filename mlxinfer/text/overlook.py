"""Methods of text that overlook marks: a template decides as if there were none. Knows no jinja.

Marks are three characters put into a text for whoever reads the rendering: one opens, one closes,
one keeps apart. What is made of such a text keeps all of them, next to what they stood next to; but
of a pair whose whole content a split takes away, marks that keep apart are left. Every method is
linear in the text.
"""

import re
from collections.abc import Iterator
from typing import Any

_QUESTIONS = frozenset(("startswith", "endswith", "find", "rfind", "index", "rindex", "count"))
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
    return _part(text, start, len(result), marks)


def cut_overlooking(marks: str, text: str, part: slice) -> str:
    """Return a part, without steps, of the text without its marks, with the marks in it."""
    start, stop, _ = part.indices(len(without(text, marks)))
    return _part(text, start, max(stop - start, 0), marks)


def _part(text: str, start: int, length: int, marks: str) -> str:
    """Return so many characters from a place on, marks aside, and all marks."""
    begin = _after(start, text, 0, marks)
    end = _after(length, text, begin, marks)
    return _marks_in(text[:begin], marks) + text[begin:end] + _marks_in(text[end:], marks)


def _split(text: str, lengths: list[int], gap: int, marks: str) -> Iterator[str]:
    """Yield pieces that have these lengths, and gaps between them, where marks do not count."""
    begin, held = 0, ""
    for length in lengths[:-1]:
        end = _after(length + 1, text, begin, marks) - 1  # at the first character of the gap
        after = _after(gap, text, end, marks)
        if end > begin and _encloses(text, end, after, marks):  # a pair around what is gone
            yield held + text[begin : end - 1] + marks[2]
            begin, held = after + 1, marks[2]
        else:
            yield held + text[begin:end]
            begin, held = after, _marks_in(text[end:after], marks)
    yield held + text[begin:]


def _encloses(text: str, begin: int, end: int, marks: str) -> bool:
    """Whether a pair of marks stands around text[begin:end], and none is in it."""
    around = text[begin - 1 : begin] + text[end : end + 1]
    return around == marks[:2] and not _marks_in(text[begin:end], marks)


def _after(count: int, text: str, begin: int, marks: str) -> int:
    """Return where so many characters have passed since `begin`, marks aside."""
    seen, end = begin, begin + count
    while seen < end:
        found = sum(text.count(mark, seen, end) for mark in marks)
        seen, end = end, end + found
    return end


def _marks_in(text: str, marks: str) -> str:
    return re.sub(f"[^{re.escape(marks)}]+", "", text)
