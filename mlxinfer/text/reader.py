"""Text that arrives in pieces, for parsers that are written as generators.

A parser is a generator. It yields, without a value, whenever it has used up the text. It never
decides by how much text has arrived, so its result does not depend on how the text is divided. Each
character is looked at a bounded number of times.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]

MAX_WORD = 256  # characters of a name, a key or a number
SPACE = re.compile(r"\s+")
_ALL = re.compile(".+", re.DOTALL)


class Malformed(Exception):
    """The text is not what a parser expected, such as a tool call; the message says why."""


class TextReader:
    """The characters still to be read, and those read since the last `commit`.

    Text that was read is kept until it is committed. If it turns out to be no call, it is returned
    as text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._taken: list[str] = []
        self.num_taken = 0  # characters read so far
        self._cut_mark = -1  # where the end of the text cuts off a mark that was looked for

    @classmethod
    def of(cls, text: str) -> "TextReader":
        reader = cls()
        reader.feed(text)
        reader.close()
        return reader

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        self._closed = True

    @property
    def at_end(self) -> bool:
        """Whether nothing more arrives, and all is read except perhaps the beginning of a mark."""
        return self._closed and self._at in (len(self._text), self._cut_mark)

    def drop(self) -> None:
        self._at = len(self._text)
        self.commit()

    def commit(self) -> str:
        """Return the text read since the last commit, and drop it."""
        taken = "".join(self._taken)
        self._taken.clear()
        return taken

    def more(self) -> Parse[bool]:
        """Wait for a character; return False at the end of the text."""
        while self._at == len(self._text):
            if self._closed:
                return False
            yield
        return True

    def peek(self) -> Parse[str]:
        return self._text[self._at] if (yield from self.more()) else ""

    def take(self, count: int = 1) -> str:
        taken = self._text[self._at : self._at + count]
        assert len(taken) == count
        self._at += count
        self.num_taken += count
        self._taken.append(taken)
        return taken

    def run(self, pattern: re.Pattern[str]) -> Parse[str]:
        """Read the characters that match here and have arrived; "" where the run ends.

        Args:
            pattern: one character class, repeated, so that a piece of a run matches too.
        """
        if not (yield from self.more()):
            return ""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def whole_run(self, pattern: re.Pattern[str]) -> Parse[str]:
        """Read a whole run; raise Malformed past MAX_WORD characters."""
        pieces: list[str] = []
        size = 0
        while piece := (yield from self.run(pattern)):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_WORD:
                raise Malformed(f"more than {MAX_WORD} characters of a name or a number")
        return "".join(pieces)

    def space(self) -> Parse[None]:
        while (yield from self.run(SPACE)):
            pass

    def ahead(self, marks: Sequence[str]) -> Parse[str | None]:
        """Return the longest of the marks that stands here, without reading it."""
        for mark in sorted(marks, key=len, reverse=True):
            while True:
                text = self._text[self._at : self._at + len(mark)]
                if text == mark:
                    return mark
                if not mark.startswith(text):
                    break
                if self._closed:
                    self._cut_mark = self._at
                    break
                yield
        return None

    def accept(self, *marks: str) -> Parse[str | None]:
        mark = yield from self.ahead(marks)
        if mark is not None:
            self.take(len(mark))
        return mark

    def expect(self, *marks: str) -> Parse[str]:
        mark = yield from self.accept(*marks)
        if mark is None:
            raise Malformed(f"expected {' or '.join(marks)}")
        return mark

    def until(self, *marks: str, limit: int | None = None) -> Parse[str]:
        """Read up to one of the marks, without the mark; return the text before it.

        Raises Malformed at the end of the text, and past `limit` characters.
        """
        pieces: list[str] = []
        yield from self.pass_until(marks, pieces.append, limit)
        return "".join(pieces)

    def pass_until(
        self, marks: Sequence[str], emit: Callable[[str], object], limit: int | None = None
    ) -> Parse[str]:
        """Read up to one of the marks, and pass the text on as it arrives; return that mark."""
        size = 0
        stops = _stops(tuple(marks))
        while True:
            piece = yield from self.run(stops)
            if not piece:
                more = yield from self.more()
                mark = (yield from self.ahead(marks)) if more else None
                if mark is not None:
                    return mark
                if not more or self.at_end:
                    raise Malformed(f"the text ended before {marks[0]}")
                piece = self.take()
            emit(piece)
            size += len(piece)
            if limit is not None and size > limit:
                raise Malformed(f"more than {limit} characters before {marks[0]}")

    def rest(self, emit: Callable[[str], object]) -> Parse[None]:
        while piece := (yield from self.run(_ALL)):
            emit(piece)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@cache
def _stops(marks: tuple[str, ...]) -> re.Pattern[str]:
    firsts = "".join(sorted({mark[0] for mark in marks}))
    return re.compile(f"[^{re.escape(firsts)}]+")
