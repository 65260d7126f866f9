"""GLM 4.5 to 4.7: <tool_call>f<arg_key>x</arg_key><arg_value>value</arg_value>...</tool_call>.

Source: the chat templates of zai-org/GLM-4.6 (line breaks between the tags) and GLM-4.7 (none).
Values that are no strings are JSON.
"""

from .format import CallWriter, Clues, ToolFormat
from .lark import Lark, value_rule
from .reader import MAX_WORD, Malformed, Parse, Reader
from .schema import Tool, Toolbox
from .xmlcall import XmlArguments


class Glm(ToolFormat):
    """The name, then keys and values in turn, between tags."""

    name = "glm"
    begins = ("<tool_call>",)
    ends = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def detect(self, clues: Clues) -> bool:
        """The template writes keys between tags."""
        return "<arg_key>" in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one call."""
        name = yield from reader.until("<arg_key>", "</tool_call>", "<tool_call>", limit=MAX_WORD)
        if not name.strip() or len(name.split()) != 1:
            raise Malformed(f"{name!r} is no name")
        calls.begin(name.strip())
        arguments = XmlArguments(reader, calls, calls.tools.get(name.strip()), trim=False)
        while (yield from reader.expect("<arg_key>", "</tool_call>")) == "<arg_key>":
            key = (yield from reader.until("</arg_key>", limit=MAX_WORD)).strip()
            yield from reader.expect("</arg_key>")
            yield from reader.space()
            yield from reader.expect("<arg_value>")
            yield from arguments.value(key, ["</arg_value>"])
            yield from reader.expect("</arg_value>")
            yield from reader.space()
        arguments.end()

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Parameters in the schema's order, required ones first."""
        call = lark.one_of([self._call_rule(lark, tool) for tool in tools.alternatives()])
        return lark.repeated(call, "\n", parallel=parallel)

    def _call_rule(self, lark: Lark, tool: Tool) -> str:
        def parameter(name: str) -> str:
            head = lark.text(f"<arg_key>{name}</arg_key>\n<arg_value>")
            return f"{head} {value_rule(lark, tool, name, '</arg_value>')} {lark.text(chr(10))}"

        head = lark.text(f"<tool_call>{tool.name}\n")
        return f"{head} {lark.arguments(tool, parameter)} {lark.text('</tool_call>')}"
