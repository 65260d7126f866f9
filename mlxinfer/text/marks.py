"""Fixed marks found in text that arrives in pieces. Knows characters only; no tokens."""

import re
from collections.abc import Sequence


class MarkScanner:
    """Splits arriving text at marks such as `</think>`; holds back what may become one.

    The mark that begins first wins; of two at the same place, the longer.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._first = re.compile("[" + re.escape("".join({m[0] for m in marks})) + "]")
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Return (text, is a mark) in order, all that is certain."""
        text = self._held + text
        parts: list[tuple[str, bool]] = []
        start = position = 0
        while candidate := self._first.search(text, position):
            position = candidate.start()
            mark = self._mark_at(text, position)
            if mark is None:
                position += 1
                continue
            if len(mark) > len(text) - position:  # the text ends within it
                break
            parts += [(text[start:position], False), (mark, True)]
            start = position = position + len(mark)
        else:
            position = len(text)
        self._held = text[position:]
        parts.append((text[start:position], False))
        return [part for part in parts if part[0]]

    def finish(self) -> str:
        """Return what was held back: no mark after all."""
        held, self._held = self._held, ""
        return held

    def _mark_at(self, text: str, position: int) -> str | None:
        """Return the longest mark that stands here, or of which the text ends in the beginning."""
        rest = len(text) - position
        for mark in self._marks:
            if text.startswith(mark[:rest], position):
                return mark
        return None
