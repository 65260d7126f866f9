"""Qwen3-Coder, Qwen 3.5 and later: <tool_call><function=f><parameter=x>value</parameter>...

Source: the chat template and qwen3coder_tool_parser.py of Qwen/Qwen3-Coder-30B-A3B-Instruct; one
line break on each side of a value belongs to the tags. As SGLang's qwen3_coder detector does, a
value also ends where the next parameter or the function's end stands, and <tool_call> may be
missing.
"""

from .format import CallWriter, Clues, ToolFormat
from .lark import Lark, value_rule
from .reader import MAX_WORD, Malformed, Parse, Reader
from .schema import Tool, Toolbox
from .xmlcall import XmlArguments

_ENDS = ("</parameter>", "<parameter=", "</function>")


class QwenXml(ToolFormat):
    """A function between tags within tags, its parameters without quotes."""

    name = "qwen_xml"
    begins = ("<tool_call>", "<function=")
    ends = ("</tool_call>", "</function>", "<parameter=", "</parameter>")

    def detect(self, clues: Clues) -> bool:
        """The template shows how to write a function."""
        return "<function=" in clues.template and "<parameter=" in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a function, and others within the same <tool_call>."""
        if mark == "<tool_call>":
            yield from reader.space()
            yield from reader.expect("<function=")
        while True:
            yield from self._function(reader, calls)
            yield from reader.space()
            found = yield from reader.accept("</tool_call>", "<function=")
            if found != "<function=":
                break
        if found:
            reader.commit()

    def _function(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        name = (yield from reader.until(">", limit=MAX_WORD)).strip()
        reader.take()
        if not name:
            raise Malformed("a function without a name")
        calls.begin(name)
        arguments = XmlArguments(reader, calls, calls.tools.get(name), trim=True)
        while True:
            yield from reader.space()
            if (yield from reader.expect("<parameter=", "</function>")) == "</function>":
                break
            parameter = (yield from reader.until(">", limit=MAX_WORD)).strip()
            reader.take()
            yield from arguments.value(parameter, _ENDS)
            yield from reader.accept("</parameter>")
        arguments.end()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Parameters in the schema's order, required ones first."""
        call = lark.one_of([self._call_rule(lark, tool) for tool in tools.alternatives()])
        return lark.repeated(call, "\n", parallel=parallel)

    def _call_rule(self, lark: Lark, tool: Tool) -> str:
        def parameter(name: str) -> str:
            value = value_rule(lark, tool, name, "\n</parameter>\n")
            return f"{lark.text(f'<parameter={name}>{chr(10)}')} {value}"

        head = lark.text(f"<tool_call>\n<function={tool.name}>\n")
        return f"{head} {lark.arguments(tool, parameter)} {lark.text('</function>')} " + lark.text(
            "\n</tool_call>"
        )
