"""Kimi K2: functions.f:0 and JSON between control tokens, within a section.

Source: the chat template and docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct. The number
counts the calls of a conversation; with the name it is the model's id of the call.
"""

import re

from .format import CallWriter, Clues, ToolFormat, read_section
from .jsoncall import read_arguments
from .lark import Lark
from .reader import MAX_WORD, Malformed, Parse, Reader
from .schema import Toolbox

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
_ID = re.compile(r"\s*(?:functions\.)?([\w.:/-]+?)(?::[0-9]+)?\s*")


class Kimi(ToolFormat):
    """A section of calls."""

    name = "kimi"
    begins = (SECTION, CALL)
    ends = (SECTION_END, ARGUMENTS, CALL_END)

    def detect(self, clues: Clues) -> bool:
        """The section's mark is in the template or among the tokens."""
        return SECTION in clues.template or SECTION in clues.tokens

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section or one call; missing end marks are tolerated."""
        if mark == SECTION:
            yield from reader.space()
            yield from reader.expect(CALL)
        yield from read_section(
            reader,
            lambda: _call(reader, calls),
            begin=CALL,
            end=CALL_END,
            section_end=SECTION_END,
        )

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Calls with any number after the name."""
        number = lark.rule("/[0-9]{1,4}/")
        options = [
            f"{lark.text(f'{CALL}functions.{tool.name}:')} {number} {lark.text(ARGUMENTS)} "
            f"{lark.parameters(tool)} {lark.text(CALL_END)}"
            for tool in tools
        ]
        calls = lark.repeated(lark.one_of(options), "", parallel=parallel)
        return f"{lark.text(SECTION)} {calls} {lark.text(SECTION_END)}"


def _call(reader: Reader, calls: CallWriter) -> Parse[None]:
    found = _ID.fullmatch((yield from reader.until(ARGUMENTS, limit=MAX_WORD)))
    yield from reader.expect(ARGUMENTS)
    if found is None:
        raise Malformed("a call without a name")
    yield from read_arguments(reader, calls, found.group(1))
