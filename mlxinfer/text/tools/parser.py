"""Finds tool calls in arriving text. Knows where calls may begin; formats know how they go on."""

import re
from collections.abc import Callable

from ...parts import Part, TextPart, merged
from .format import Calls, ToolFormat
from .reader import Malformed, Reader, Steps, compiled
from .schema import Toolbox


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
        self._calls = Calls(self._reader, tools, new_id or format.new_id)
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

    def _run(self) -> Steps[None]:
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

    def _call(self, mark: str) -> Steps[bool]:
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
