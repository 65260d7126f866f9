"""The interface of tool-call formats, and the parser that runs one over arriving text.

A format knows where calls may begin and reads them (`ToolFormat.read`); it reports each to a
`CallWriter`. `ToolParser` finds the beginnings, and gives text back that turns out to be no call.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...outputs import CallStatus, Part, TextPart, ToolCallDelta, merged
from ..reader import Malformed, Parse, TextReader, compiled
from .lark import Lark
from .schema import Toolbox


class CallWriter:
    """Receives the calls of one answer from a format, and turns them into parts.

    A call is begun before its arguments are complete, so that they can be shown as they arrive.

    Attributes:
        parts: text and pieces of calls that the parser has not returned yet.
        count: calls that have ended, complete or broken.
        name: of the call that began last.
        is_open: that call has not ended.
    """

    def __init__(self, reader: TextReader, tools: Toolbox, new_id: Callable[[], str]) -> None:
        self.tools = tools
        self.parts: list[Part] = []
        self.count = 0
        self.name = ""
        self.is_open = False
        self._reader = reader
        self.new_id = new_id

    def require_known(self, name: str) -> None:
        if name not in self.tools:
            raise Malformed(f"no tool is called {name}")

    def begin(self, name: str) -> None:
        assert not self.is_open
        if not name:
            raise Malformed("a call without a name")
        self.name, self.is_open = name, True
        self.parts.append(ToolCallDelta(index=self.count, id=self.new_id(), name=name))

    def arguments(self, text: str) -> None:
        self.parts.append(ToolCallDelta(index=self.count, arguments=text))

    def end(self) -> None:
        """End the call: its arguments are complete, and all text read so far belongs to it."""
        self._close(CallStatus.DONE)
        self._reader.commit()

    def broken(self) -> None:
        """End an open call as BROKEN: it turned out to be none, and its text follows."""
        if self.is_open:
            self._close(CallStatus.BROKEN)

    def cut(self) -> None:
        """The answer ended within the call: its text is dropped, and an open call ends CUT."""
        if self.is_open:
            self._close(CallStatus.CUT)
        self._reader.drop()

    def _close(self, status: CallStatus) -> None:
        assert self.is_open
        self.is_open = False
        self.parts.append(ToolCallDelta(index=self.count, status=status))
        self.count += 1


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of an earlier turn."""

    name: str  # of the function
    arguments: Any  # an object; or a text, where the client has sent what is no JSON object
    id: str = ""  # as the client has sent it

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> "WrittenCall":
        function = call.get("function", call)
        return cls(str(function.get("name")), function.get("arguments"), str(call.get("id") or ""))

    @property
    def text(self) -> str:
        """The arguments as JSON; a text as it is."""
        if isinstance(self.arguments, str):
            return self.arguments or "{}"
        return json.dumps(self.arguments or {}, ensure_ascii=False)

    @property
    def items(self) -> Mapping[str, Any]:
        """The arguments by their names; a text is called "arguments"."""
        if isinstance(self.arguments, Mapping):
            return self.arguments
        return {"arguments": self.arguments} if self.arguments else {}


class ToolFormat(ABC):
    """How a family of models writes its calls.

    Attributes:
        begins: texts that begin a call, wherever they stand.
        bare: texts that begin one only as the first of an answer, or right after a call. Nothing
            else marks such a call, so it counts only if it names a declared tool.
        ends: other texts that the format looks for. Where they are control tokens, they must not
            be left out of the text, like those in `begins`.
    """

    name: ClassVar[str]
    begins: ClassVar[tuple[str, ...]]
    bare: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begins + self.ends

    @abstractmethod
    def read(self, reader: TextReader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one call or several. Their `mark` has just been read."""

    @abstractmethod
    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Return a rule that matches one call of these tools, or one and more if `parallel`."""

    def write(self, calls: Sequence[WrittenCall]) -> str:
        """Return calls of earlier turns as the model writes them.

        Unless a format says otherwise, each is a JSON object between tags, as Hermes's models do.
        """
        return "\n".join(
            f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, '
            f'"arguments": {call.text}}}\n</tool_call>'
            for call in calls
        )

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Visible text in, parts out: text and tool calls in their order.

    The parts of all pushes, merged, do not depend on how the text is divided into pushes.

    - Arguments are passed on as they arrive. Text that turns out to be no call comes out as it was;
      if its arguments were passed on, the call ends BROKEN first.
    - A call that the end of the answer cuts off ends CUT, and is no text. Before its name is
      complete it is text, unless the answer has to be a call (`must_call`): then it is dropped.
    - A call of an undeclared tool is a call: the program that runs tools can answer the model so.
      Only where nothing but the name marks a call (`ToolFormat.bare`) it is text.
    - White space between calls, before and after them is dropped, and so is the beginning of a mark
      after a call, at the end of the answer.

    Args:
        format: how the model writes calls.
        tools: the tools; their schemas tell strings from numbers where a format does not.
        new_id: makes the ids of calls; None: the format does.

    Attributes:
        marks: texts that must reach the parser, control tokens or not.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Toolbox,
        *,
        must_call: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._format = format
        self._reader = TextReader()
        self._calls = CallWriter(self._reader, tools, new_id or format.new_id)
        self.marks = format.marks
        self._must_call = must_call
        begins = (*format.begins, *format.bare)
        firsts = re.escape("".join(sorted({begin[0] for begin in begins})))
        self._word = compiled(f"[^\\s{firsts}]+")
        self._steps = self._run()
        self._done = False
        self.text_end = 0  # the number of characters up to the last text that is no call

    def another(self, new_id: Callable[[], str] | None = None) -> "ToolParser":
        return ToolParser(self._format, self._calls.tools, new_id=new_id or self._calls.new_id)

    def push(self, text: str) -> tuple[Part, ...]:
        """Return the parts that are certain now."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> tuple[Part, ...]:
        """Return what was held back, at the end of the answer."""
        self._reader.close()
        return self._advance()

    def _advance(self) -> tuple[Part, ...]:
        if not self._done:
            self._done = next(self._steps, "done") == "done"
        parts = merged(self._calls.parts)
        self._calls.parts.clear()
        return parts

    def _run(self) -> Parse[None]:
        """Read words and calls; white space is held back until the next of them."""
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
            if fresh and reader.at_end and (self._calls.count or self._must_call):
                reader.drop()  # the beginning of a mark
                break
            if not (yield from reader.run(self._word)):
                reader.take()
            self._text(reader.commit())
            fresh = False
        rest = reader.commit()
        if not (self._calls.count and fresh and rest.isspace()):
            self._text(rest)

    def _call(self, mark: str) -> Parse[bool]:
        """Read a call; return whether it was one."""
        try:
            yield from self._format.read(self._reader, self._calls, mark)
        except Malformed:
            if self._reader.at_end and (self._calls.is_open or self._must_call):
                self._calls.cut()
                return True
            self._calls.broken()
            self._text(self._reader.commit())
            return False
        assert not self._calls.is_open
        return True

    def _text(self, text: str) -> None:
        if text:
            self.text_end = self._reader.num_taken
            self._calls.parts.append(TextPart(text))
