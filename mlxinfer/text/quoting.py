"""Marks around what a user wrote like a control token. Knows plain data and text; no tokenizer."""

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from .overlook import without


class Marks:
    """Private-use characters that the inputs do not hold, and what two of them are put around.

    The third stands where a template took out what they enclosed: what was apart stays apart.
    """

    def __init__(
        self, regex: re.Pattern[str], used: set[str], *, names: re.Pattern[str], fold: bool
    ) -> None:
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        self._open, self._close, self._apart = next(free), next(free), next(free)
        self._regex = regex
        self._names = names  # what they are put around in keys, by which templates find values
        self._fold = fold

    @property
    def characters(self) -> str:
        """That which opens, that which closes, that which keeps apart."""
        return self._open + self._close + self._apart

    def put_into(self, value: Any) -> Any:
        """Return the inputs with marks around control-token text, in keys and values."""
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
        """Yield (piece, is plain text) of a rendering.

        A template may have cut a marked text apart. A lone mark still separates what stands around
        it, and one that touches control-token text makes that plain.
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
        return without(self._spelled_out(text), self.characters)

    def _spelled_out(self, text: str) -> str:
        for mark in self.characters:
            text = _escaped(mark).sub(mark, text)
        return text


def _escaped(mark: str) -> re.Pattern[str]:
    """Return what matches a mark as JSON or Python spell it, where a template wrote out a value."""
    spellings = (json.dumps(mark)[1:-1], repr(mark)[1:-1])
    either = "|".join(s.replace("\\", r"\\+") for s in spellings)
    return re.compile(rf"(?<!\\)(?:{either})")  # once a run of backslashes, which may be long


def _piece(text: str, is_plain: bool) -> Iterator[tuple[str, bool]]:
    if text:
        yield text, is_plain
