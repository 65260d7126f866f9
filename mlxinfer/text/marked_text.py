"""Marks around user text that spells a control token, and string methods that ignore them.

A mark is one of three private-use characters that no input holds: the first opens, the second
closes, the third keeps apart. A template must decide and write as if there were no marks, so
`call_ignoring_marks` and `slice_ignoring_marks` compute on the text without them and put them back
next to their neighbours. Where a split removes the whole content of a pair, a mark of the third
kind stays. Every function is linear in the text.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

_QUESTIONS = frozenset(("startswith", "endswith", "find", "rfind", "index", "rindex", "count"))
_CUTS = frozenset(("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"))
_SPLITS = frozenset(("split", "rsplit"))


class TextMarks:
    """Three private-use characters, chosen per request so that no input holds them.

    Args:
        regex: what gets marks around it in texts.
        used: characters of the inputs, of which no mark is chosen.
        names: the same for keys, by which a template finds values.
        fold: texts are normalised (NFKC) before `regex` is looked for.
    """

    def __init__(
        self, regex: re.Pattern[str], used: set[str], *, names: re.Pattern[str], fold: bool
    ) -> None:
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        self._open, self._close, self._apart = next(free), next(free), next(free)
        self._regex = regex
        self._names = names
        self._fold = fold

    @property
    def characters(self) -> str:
        """The opening, the closing and the separating mark."""
        return self._open + self._close + self._apart

    def put_into(self, value: Any) -> Any:
        """Return plain data with marks around control-token text, in keys and in values."""
        if isinstance(value, str):
            return self._around(self._regex, value)
        if isinstance(value, dict):
            names = self._names
            return {self._around(names, key): self.put_into(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put_into(item) for item in value]
        return value

    def _around(self, regex: re.Pattern[str], value: Any) -> Any:
        if not isinstance(value, str):
            return value
        text = unicodedata.normalize("NFKC", value) if self._fold else value
        return regex.sub(f"{self._open}\\g<0>{self._close}", text)

    def split(self, text: str, pattern: str) -> Iterator[tuple[str, bool]]:
        """Yield (piece, is user text) of a rendering.

        A template may have cut a marked text apart. A mark without its partner still separates what
        stands on its two sides, and control-token text that touches one is user text.
        """
        text = self._spelled_out(text)
        opened, closed = self._open, self._close
        edge = re.compile(f"{opened}({pattern}){closed}?|({pattern}){closed}|[{self.characters}]")
        position = 0
        for found in edge.finditer(text):
            yield from _piece(text[position : found.start()], False)
            yield from _piece(found.group(1) or found.group(2) or "", True)
            position = found.end()
        yield from _piece(text[position:], False)

    def taken_from(self, text: str) -> str:
        """Return a rendering without its marks."""
        return without_marks(self._spelled_out(text), self.characters)

    def _spelled_out(self, text: str) -> str:
        for mark in self.characters:
            text = _escaped(mark).sub(mark, text)
        return text


def _escaped(mark: str) -> re.Pattern[str]:
    """Return a pattern of a mark as JSON or Python's repr spell it, in values that were written
    out.
    """
    spellings = (json.dumps(mark)[1:-1], repr(mark)[1:-1])
    either = "|".join(s.replace("\\", r"\\+") for s in spellings)
    return re.compile(
        rf"(?<!\\)(?:{either})"
    )  # each run of backslashes is matched once: it may be long


def _piece(text: str, is_plain: bool) -> Iterator[tuple[str, bool]]:
    if text:
        yield text, is_plain


def without_marks(value: Any, marks: str) -> Any:
    """Return a text without its marks; return any other value as it is."""
    if isinstance(value, str):
        for mark in marks:
            value = value.replace(mark, "")
    return value


def only_marks(marks: str, value: Any) -> bool:
    """Whether a value is a text that consists of marks."""
    return isinstance(value, str) and bool(value) and not value.strip(marks)


def ignores_marks(name: str, args: tuple[Any, ...]) -> bool:
    """Whether `call_ignoring_marks` implements this string method with these arguments."""
    separated = name in _SPLITS and bool(args) and isinstance(args[0], str)
    return separated or name in _QUESTIONS or name in _CUTS


def call_ignoring_marks(marks: str, text: str, name: str, args: tuple[Any, ...]) -> Any:
    """Return what a string method gives for the text without its marks, with the marks put back.

    The result of a question (find, startswith, count) is the plain one. Parts of the text (strip,
    split, removeprefix) keep all marks, each beside the character that it stood beside.
    """
    plain = without_marks(text, marks)
    args = tuple(without_marks(arg, marks) for arg in args)
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


def slice_ignoring_marks(marks: str, text: str, part: slice) -> str:
    """Return `text[part]`, without a step, with all marks; marks do not count as positions."""
    start, stop, _ = part.indices(len(without_marks(text, marks)))
    return _part(text, start, max(stop - start, 0), marks)


def _part(text: str, start: int, length: int, marks: str) -> str:
    """Return `length` characters from `start` on with all marks; marks do not count as
    positions.
    """
    begin = _after(start, text, 0, marks)
    end = _after(length, text, begin, marks)
    return _marks_in(text[:begin], marks) + text[begin:end] + _marks_in(text[end:], marks)


def _split(text: str, lengths: list[int], gap: int, marks: str) -> Iterator[str]:
    """Yield pieces of these lengths, with `gap` characters between them; marks do not count."""
    begin, held = 0, ""
    for length in lengths[:-1]:
        end = _after(length + 1, text, begin, marks) - 1  # at the first character of the gap
        after = _after(gap, text, end, marks)
        if end > begin and _encloses(text, end, after, marks):  # a pair encloses the gap
            yield held + text[begin : end - 1] + marks[2]
            begin, held = after + 1, marks[2]
        else:
            yield held + text[begin:end]
            begin, held = after, _marks_in(text[end:after], marks)
    yield held + text[begin:]


def _encloses(text: str, begin: int, end: int, marks: str) -> bool:
    """Whether a pair of marks stands around text[begin:end] with no mark inside."""
    around = text[begin - 1 : begin] + text[end : end + 1]
    return around == marks[:2] and not _marks_in(text[begin:end], marks)


def _after(count: int, text: str, begin: int, marks: str) -> int:
    """Return the position after `count` characters from `begin` on, marks not counted."""
    seen, end = begin, begin + count
    while seen < end:
        found = sum(text.count(mark, seen, end) for mark in marks)
        seen, end = end, end + found
    return end


def _marks_in(text: str, marks: str) -> str:
    return re.sub(f"[^{re.escape(marks)}]+", "", text)


def literal_pattern(literals: Iterable[str]) -> str:
    """Return a pattern that matches any of the strings, the longest one at each position.

    The strings are laid out as a prefix tree, so that a position costs at most as many steps as the
    longest string has characters, however many strings there are: a vocabulary has thousands of
    control tokens, and a hostile text is made of their first characters.
    """
    ordered = sorted({text for text in literals if text})
    return _branch(ordered) if ordered else "(?!)"


def _branch(ordered: list[str]) -> str:
    """Return the pattern of sorted, distinct strings; "" among them makes the rest optional."""
    optional = ordered[0] == ""
    groups: dict[str, list[str]] = {}
    for text in ordered[1:] if optional else ordered:
        groups.setdefault(text[0], []).append(text)
    if not groups:
        return ""
    parts = [_stem(group) for group in groups.values()]
    joined = f"(?:{'|'.join(parts)})"
    return joined + "?" if optional else joined


def _stem(group: list[str]) -> str:
    """Return the pattern of sorted strings that begin alike."""
    first, last = group[0], group[-1]
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    if length is None:
        length = min(len(first), len(last))
    return re.escape(first[:length]) + _branch([text[length:] for text in group])
