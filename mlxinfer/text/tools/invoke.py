"""<invoke name="f"><parameter name="x">value</parameter></invoke>: MiniMax M2, DeepSeek V3.2.

Source: the chat templates of MiniMaxAI/MiniMax-M2 (within <minimax:tool_call>) and
deepseek-ai/DeepSeek-V3.2 (within <｜DSML｜function_calls>, each tag with ｜DSML｜; a parameter has
string="true" or "false"; other values than strings are JSON).
"""

import json
import re

from .format import CallWriter, Clues, ToolFormat
from .lark import Lark, value_rule
from .reader import MAX_WORD, Malformed, Parse, Reader
from .schema import Tool, Toolbox
from .xmlcall import XmlArguments

_NAME = re.compile(r"""\s*name=(?:"([^"]+)"|'([^']+)'|([^\s"'>]+))""")
_STRING = re.compile(r'string="(true|false)"')


class Invoke(ToolFormat):
    """A section of invocations.

    Args:
        name: under which a user chooses it.
        section: the tag around all calls.
        prefix: stands before the names of the tags inside.
        typed: each parameter says whether it is a string.
    """

    def __init__(self, name: str, section: str, prefix: str, *, typed: bool) -> None:
        self.name = name  # type: ignore[misc]  # one class, two formats
        self._prefix, self._typed = prefix, typed
        self._invoke, self._invoke_end = f"<{prefix}invoke", f"</{prefix}invoke>"
        self._parameter, self._parameter_end = f"<{prefix}parameter", f"</{prefix}parameter>"
        self._section_end = f"</{section}>"
        self.begins = (f"<{section}>",)  # type: ignore[misc]
        self.ends = (  # type: ignore[misc]
            *(self._section_end, self._invoke, self._invoke_end),
            *(self._parameter, self._parameter_end),
        )

    def detect(self, clues: Clues) -> bool:
        """The section's tag stands in the template."""
        return self.begins[0] in clues.template

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section; a missing end tag is tolerated."""
        yield from reader.space()
        yield from reader.expect(self._invoke)
        while True:
            yield from self._call(reader, calls)
            yield from reader.space()
            found = yield from reader.accept(self._invoke, self._section_end)
            if found != self._invoke:
                break
        if found:
            reader.commit()

    def _call(self, reader: Reader, calls: CallWriter) -> Parse[None]:
        name, _ = yield from self._tag(reader)
        calls.begin(name)
        arguments = XmlArguments(reader, calls, calls.tools.get(name), trim=False)
        while True:
            yield from reader.space()
            if (yield from reader.expect(self._parameter, self._invoke_end)) == self._invoke_end:
                break
            parameter, rest = yield from self._tag(reader)
            string = _STRING.search(rest)
            kind = None if string is None else string.group(1) == "true"
            yield from arguments.value(parameter, [self._parameter_end], is_string=kind)
            yield from reader.expect(self._parameter_end)
        arguments.end()

    def _tag(self, reader: Reader) -> Parse[tuple[str, str]]:
        """Read the rest of a tag; return the name in it, and all of it."""
        rest = yield from reader.until(">", limit=2 * MAX_WORD)
        reader.take()
        found = _NAME.match(rest)
        if found is None:
            raise Malformed("a tag without a name")
        return next(group for group in found.groups() if group), rest

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Parameters in the schema's order, required ones first."""
        call = lark.one_of([self._call_rule(lark, tool) for tool in tools.alternatives()])
        calls = lark.repeated(call, "", parallel=parallel)
        return f"{lark.text(self.begins[0] + chr(10))} {calls} {lark.text(self._section_end)}"

    def _call_rule(self, lark: Lark, tool: Tool) -> str:
        def parameter(name: str) -> str:
            types = tool.types_of(name)
            kind = f' string="{json.dumps("string" in types or not types)}"' if self._typed else ""
            head = lark.text(f'{self._parameter} name="{name}"{kind}>')
            return f"{head} {value_rule(lark, tool, name, self._parameter_end + chr(10))}"

        head = lark.text(f'{self._invoke} name="{tool.name}">\n')
        return f"{head} {lark.arguments(tool, parameter)} {lark.text(self._invoke_end + chr(10))}"


MINIMAX = Invoke("minimax", "minimax:tool_call", "", typed=False)
DSML = Invoke("deepseek_dsml", "｜DSML｜function_calls", "｜DSML｜", typed=True)
