"""Calls written as tags: Qwen3-Coder, GLM 4.5, MiniMax M2, DeepSeek V3.2."""

import json
import re
from collections.abc import Sequence

from .format import CallWriter, Clues, ToolFormat
from .lark import Lark, value_rule
from .reader import MAX_WORD, Malformed, Parse, Reader, compiled
from .schema import Tool, Toolbox, json_of

_QWEN_ENDS = ("</parameter>", "<parameter=", "</function>")
_TAG_NAME = re.compile(r"""\s*name=(?:"([^"]+)"|'([^']+)'|([^\s"'>]+))""")
_STRING_TYPE = re.compile(r'string="(true|false)"')


class XmlArguments:
    """The arguments of one call, written as one JSON object while its parameters arrive.

    A value that can only be a string is passed on as it arrives; others once they are complete,
    since only then their type is known.

    Args:
        reader: the text.
        calls: receives the JSON; the call has begun.
        tool: its schema has the types.
        trim: one line break after the tag before a value, and one before the tag after it, belong
            to the tags.
    """

    def __init__(self, reader: Reader, calls: CallWriter, tool: Tool, *, trim: bool) -> None:
        self._reader, self._calls, self._tool, self._trim = reader, calls, tool, trim
        self._names: set[str] = set()
        calls.arguments("{")

    def value(
        self, name: str, ends: Sequence[str], *, is_string: bool | None = None
    ) -> Parse[None]:
        """Read the value of a parameter up to one of `ends`, which is not read.

        `is_string` is the type in the tag, None where the tag has none.
        """
        if name in self._names:
            raise Malformed(f"{name} is given twice")
        self._names.add(name)
        key = json.dumps(name, ensure_ascii=False)
        self._calls.arguments(f"{', ' if len(self._names) > 1 else ''}{key}: ")
        if self._trim:
            yield from self._reader.accept("\n")
        types = self._tool.types_of(name)
        if is_string is not None:
            types = frozenset({"string"}) if is_string else types - {"string"}
        if types == {"string"}:
            yield from self._stream(ends)
            return
        text = yield from self._reader.until(*ends)
        if self._trim:
            text = text.removesuffix("\n")
        self._calls.arguments(json_of(text, types))

    def end(self) -> None:
        """End the object and the call."""
        self._calls.arguments("}")
        self._calls.end()

    def _stream(self, ends: Sequence[str]) -> Parse[None]:
        reader = self._reader
        firsts = re.escape("".join(sorted({end[0] for end in ends})))
        plain = compiled(f"[^\n{firsts}]+")
        stops = [*ends, *(f"\n{end}" for end in ends)] if self._trim else list(ends)
        self._calls.arguments('"')
        while True:
            piece = yield from reader.run(plain)
            if not piece:
                if not (yield from reader.more()):
                    raise Malformed(f"the text ended before {ends[0]}")
                stop = yield from reader.ahead(stops)
                if stop is not None:
                    break
                if reader.at_end:
                    raise Malformed("the text ended within a mark")
                piece = reader.take()
            self._calls.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
        reader.take(len(stop) - len(stop.removeprefix("\n")))
        self._calls.arguments('"')


class QwenXml(ToolFormat):
    """Qwen3-Coder, Qwen 3.5 and later: <tool_call><function=f><parameter=x>value</parameter>...

    One line break on each side of a value belongs to the tags. As SGLang's qwen3_coder detector
    does, a value also ends where the next parameter or the function's end stands, and <tool_call>
    may be missing. Source: the chat template and qwen3coder_tool_parser.py of
    Qwen/Qwen3-Coder-30B-A3B-Instruct.
    """

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
            yield from arguments.value(parameter, _QWEN_ENDS)
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


class Glm(ToolFormat):
    """GLM 4.5 to 4.7: <tool_call>f<arg_key>x</arg_key><arg_value>value</arg_value>...</tool_call>.

    Values that are no strings are JSON. Source: the chat templates of zai-org/GLM-4.6 (line breaks
    between the tags) and GLM-4.7 (none).
    """

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


class Invoke(ToolFormat):
    """<invoke name="f"><parameter name="x">value</parameter></invoke>: MiniMax M2, DeepSeek V3.2.

    Source: the chat templates of MiniMaxAI/MiniMax-M2 (within <minimax:tool_call>) and
    deepseek-ai/DeepSeek-V3.2 (within <｜DSML｜function_calls>, each tag with ｜DSML｜; a parameter
    has string="true" or "false"; other values than strings are JSON).

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
            string = _STRING_TYPE.search(rest)
            kind = None if string is None else string.group(1) == "true"
            yield from arguments.value(parameter, [self._parameter_end], is_string=kind)
            yield from reader.expect(self._parameter_end)
        arguments.end()

    def _tag(self, reader: Reader) -> Parse[tuple[str, str]]:
        """Read the rest of a tag; return the name in it, and all of it."""
        rest = yield from reader.until(">", limit=2 * MAX_WORD)
        reader.take()
        found = _TAG_NAME.match(rest)
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
