"""Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Also Qwen 2.5, Qwen 3, QwQ.

Source: the chat templates of NousResearch/Hermes-3 and Qwen/Qwen3, and the Hermes function-calling
repository (github.com/NousResearch/Hermes-Function-Calling).
"""

from .format import CallWriter, Clues, ToolFormat
from .jsoncall import read_call
from .lark import Lark
from .reader import Parse, Reader
from .schema import Toolbox


class Hermes(ToolFormat):
    """One JSON object between tags for each call."""

    name = "hermes"
    begins = ("<tool_call>",)
    ends = ("</tool_call>",)

    def detect(self, clues: Clues) -> bool:
        """The template writes the tag; formats that share it are asked before this one."""
        return "<tool_call>" in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one object; a missing end tag is tolerated."""
        yield from reader.space()
        yield from read_call(reader, calls)
        yield from reader.space()
        if (yield from reader.accept(*self.ends)):
            reader.commit()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Name first, arguments by the tool's schema."""
        options = [
            f"{lark.text(f'<tool_call>{chr(10)}' + object_head(tool.name))} "
            f"{lark.parameters(tool)} {lark.text('}' + chr(10) + '</tool_call>')}"
            for tool in tools
        ]
        return lark.repeated(lark.one_of(options), "\n", parallel=parallel)


def object_head(name: str, arguments: str = "arguments") -> str:
    """Return a call's JSON object up to its arguments, as templates write it."""
    return f'{{"name": "{name}", "{arguments}": '
