"""What a tool-call format is, and what it reports. Knows calls; no format in particular.

Finds tool calls in arriving text. Knows where calls may begin; formats know how they go on.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import ClassVar

from ...output_parts import CallStatus, Part, TextPart, ToolCallDelta, merged
from .lark import Lark
from .reader import Malformed, Parse, Reader, compiled
from .schema import Toolbox


class CallWriter:
    """The calls of one answer, as a format finds them.

    A call may be begun before its arguments are whole, so that they can be shown as they come.
    """

    def __init__(self, reader: Reader, tools: Toolbox, new_id: Callable[[], str]) -> None:
        self.tools = tools
        self.parts: list[Part] = []
        self.count = 0
        self.is_open = False
        self._reader = reader
        self._new_id = new_id

    def begin(self, name: str) -> None:
        """A call of this name begins."""
        assert not self.is_open
        if not name:
            raise Malformed("a call without a name")
        self.is_open = True
        self.parts.append(ToolCallDelta(index=self.count, id=self._new_id(), name=name))

    def arguments(self, text: str) -> None:
        """The next piece of the JSON text of the arguments."""
        self.parts.append(ToolCallDelta(index=self.count, arguments=text))

    def end(self) -> None:
        """The arguments are whole: what was read so far is this call and nothing else."""
        self._close(CallStatus.DONE)
        self._reader.commit()

    def broken(self) -> None:
        """The call that was begun is none; its text follows as such."""
        if self.is_open:
            self._close(CallStatus.BROKEN)

    def _close(self, status: CallStatus) -> None:
        assert self.is_open
        self.is_open = False
        self.parts.append(ToolCallDelta(index=self.count, status=status))
        self.count += 1


@dataclass(frozen=True, slots=True)
class Clues:
    """What a tokenizer tells about its model."""

    template: str  # all of its chat templates
    tokens: Set[str]  # added tokens


class ToolFormat(ABC):
    """How a family of models writes its calls.

    Attributes:
        name: for people, and to choose it.
        begins: texts that begin a call, wherever they stand.
        bare: texts that begin one only as the first of an answer, or right after a call. What is
            marked by nothing else is a call only if a declared tool is called.
        ends: other texts that it looks for: with `begins`, what must not be left out of the text
            where these are control tokens.
    """

    name: ClassVar[str]
    begins: ClassVar[tuple[str, ...]]
    bare: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that it looks for."""
        return self.begins + self.ends

    @abstractmethod
    def detect(self, clues: Clues) -> bool:
        """Whether the model writes this way."""

    @abstractmethod
    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a call, or several, of which `mark` has just been read.

        Raises:
            Malformed: what was read since the last whole call is text after all.
        """

    @abstractmethod
    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Return what matches one call of these tools, one or more if `parallel`."""

    def new_id(self) -> str:
        """Return an id that no other call has."""
        return f"call_{secrets.token_hex(12)}"


def read_section(
    reader: Reader, call: Callable[[], Parse[None]], *, begin: str, end: str, section_end: str
) -> Parse[None]:
    """Read calls that follow each other; the first one's mark has been read.

    Args:
        reader: where they are read from.
        call: reads one, without its marks.
        begin: the mark before each.
        end: the mark after each; a missing one is forgiven, and so is `section_end`.
        section_end: the mark after all.
    """
    while True:
        yield from call()
        yield from reader.space()
        if (yield from reader.accept(end)):
            reader.commit()
            yield from reader.space()
        if not (yield from reader.accept(begin)):
            break
    if (yield from reader.accept(section_end)):
        reader.commit()


def require_known(calls: CallWriter, name: str, mark: str, bare: tuple[str, ...]) -> None:
    """Raise Malformed where only the name tells a call from text, and no tool has it."""
    if mark in bare and name not in calls.tools:
        raise Malformed(f"no tool is called {name}")


class ToolParser:
    """Visible text in, parts out: text and tool calls in their order.

    The parts of all pushes, merged, are the same whatever pieces the text comes in.

    - Arguments are passed on as they come. What turns out to be no call, or is cut off, comes out
      as the text that it was; if its arguments were on their way, the call ends BROKEN first.
    - A call of a tool that nobody declared is a call: whoever runs tools can tell the model so.
      Only where nothing but the name tells a call from text (`ToolFormat.bare`) it is text.
    - White space between calls, before and after them is theirs, not text.

    Attributes:
        marks: texts that must reach the parser, control tokens or not.

    Args:
        format: how the model writes calls.
        tools: what it may call; their schemas tell strings from numbers where a format does not.
        new_id: makes the ids of calls; None: as the format has them.
    """

    def __init__(
        self, format: ToolFormat, tools: Toolbox, *, new_id: Callable[[], str] | None = None
    ) -> None:
        self._format = format
        self._reader = Reader()
        self._calls = CallWriter(self._reader, tools, new_id or format.new_id)
        self.marks = format.marks
        begins = (*format.begins, *format.bare)
        firsts = re.escape("".join(sorted({begin[0] for begin in begins})))
        self._word = compiled(f"[^\\s{firsts}]+")
        self._steps = self._run()
        self._done = False

    def push(self, text: str) -> tuple[Part, ...]:
        """Return what is certain now."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> tuple[Part, ...]:
        """Return what was held back, now that nothing follows."""
        self._reader.close()
        return self._advance()

    def _advance(self) -> tuple[Part, ...]:
        if not self._done:
            self._done = next(self._steps, "done") == "done"
        parts = merged(self._calls.parts)
        self._calls.parts.clear()
        return parts

    def _run(self) -> Parse[None]:
        """Words and calls; white space is held until it is known what follows."""
        reader, format = self._reader, self._format
        fresh = True  # a bare call may begin here
        while True:
            yield from reader.space()
            if not (yield from reader.more()):
                break
            begins = format.begins + (format.bare if fresh else ())
            mark = yield from reader.accept(*begins)
            if mark is not None:
                fresh = yield from self._call(mark)
                continue
            if not (yield from reader.run(self._word)):
                reader.take()
            self._text(reader.commit())
            fresh = False
        rest = reader.commit()
        if not (self._calls.count and fresh and rest.isspace()):
            self._text(rest)

    def _call(self, mark: str) -> Parse[bool]:
        """Read a call; whether it was one."""
        try:
            yield from self._format.read(self._reader, self._calls, mark)
        except Malformed:
            self._calls.broken()
            self._text(self._reader.commit())
            return False
        assert not self._calls.is_open
        return True

    def _text(self, text: str) -> None:
        if text:
            self._calls.parts.append(TextPart(text))
