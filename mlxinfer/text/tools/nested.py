"""MiniMax M3: values as nested tags, each tag after a token of its own.

Source: the chat template of MiniMax-M3. The token stands before every tag, so values may hold any
markup. An object's members are tags, and a list's items are tags called `item`.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..reader import MAX_WORD, Malformed, Parse, TextReader, compiled
from .format import CallWriter, ToolFormat
from .lark import Lark, value_rule
from .schema import Tool, Toolbox, json_of, standalone_schema
from .values import MAX_DEPTH

TOKEN = "]<]minimax[>["  # before every tag
_ITEM = "item"
_NAME = compiled(r"[\w.:/-]+")


class Nested(ToolFormat):
    """A section of calls, whose parameters are tags within tags."""

    name = "minimax_m3"
    begins = (f"{TOKEN}<tool_call>",)
    ends = (TOKEN, f"{TOKEN}</tool_call>")

    def read(self, reader: TextReader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section; a missing end of it is tolerated."""
        yield from reader.space()
        yield from reader.expect(f'{TOKEN}<invoke name="')
        while True:
            yield from self._call(reader, calls)
            yield from reader.space()
            ends = (f'{TOKEN}<invoke name="', f"{TOKEN}</tool_call>")
            end = yield from reader.accept(*ends)
            if end != ends[0]:
                reader.commit()
                return

    def _call(self, reader: TextReader, calls: CallWriter) -> Parse[None]:
        name = yield from reader.whole_run(_NAME)
        yield from reader.expect('">')
        calls.begin(name)
        yield from reader.space()
        calls.arguments("{")
        first = True
        while not (yield from reader.accept(f"{TOKEN}</invoke>")):
            key = yield from self._key(reader)
            tool = calls.tools.get(name)
            spelled = json.dumps(key, ensure_ascii=False)
            calls.arguments(f"{'' if first else ', '}{spelled}: ")
            schema = tool.properties.get(key)
            calls.arguments((yield from self._value(reader, key, schema, tool, 0)))
            yield from reader.space()
            first = False
        calls.arguments("}")
        calls.end()

    def _key(self, reader: TextReader) -> Parse[str]:
        yield from reader.expect(f"{TOKEN}<")
        key = yield from reader.until(">", limit=MAX_WORD)
        reader.take()
        return key

    def _value(
        self, reader: TextReader, key: str, schema: Any, tool: Tool, depth: int
    ) -> Parse[str]:
        """Read a value and the end of its tag; return its JSON."""
        if depth > MAX_DEPTH:
            raise Malformed(f"more than {MAX_DEPTH} tags within each other")
        end = f"{TOKEN}</{key}>"
        text = yield from reader.until(TOKEN)
        if (yield from reader.accept(end)):
            inner = Tool("", parameters={**tool.parameters, "properties": {"value": schema or {}}})
            return json_of(text, inner.types_of("value"))
        members: list[tuple[str, str]] = []
        inner = Tool("", parameters=standalone_schema(schema, tool.parameters))
        while not (yield from reader.accept(end)):
            name = yield from self._key(reader)
            part = _items(schema) if name == _ITEM else inner.properties.get(name)
            members.append((name, (yield from self._value(reader, name, part, tool, depth + 1))))
            yield from reader.space()
        if all(name == _ITEM for name, _ in members):
            return f"[{', '.join(value for _, value in members)}]"
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in members)
        return f"{{{', '.join(pairs)}}}"

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Calls with the parameters of their schemas; within lists and objects any tags."""
        anything = lark.name()
        open_tag, close = (
            f'{lark.text(f"{TOKEN}{slash}")} /[^<>]{{1,64}}/ ">"' for slash in ("<", "</")
        )
        tag = lark.rule(f"{open_tag} {anything} {close}")
        lark.rule(f"/(?s:.*)/ | {tag} {tag}*", name=anything)

        def call(tool: Tool) -> str:
            def parameter(name: str) -> str:
                head, end = lark.text(f"{TOKEN}<{name}>"), f"{TOKEN}</{name}>"
                if tool.types_of(name) & {"object", "array"}:
                    return f"{head} {anything} {lark.text(end)}"
                return f"{head} {value_rule(lark, tool, name, end)}"

            head = lark.text(f'{TOKEN}<invoke name="{tool.name}">')
            return f"{head} {lark.arguments(tool, parameter)} {lark.text(f'{TOKEN}</invoke>')}"

        option = lark.one_of([call(tool) for tool in tools.alternatives()])
        calls = lark.repeated(lark.rule(f'{option} "\\n"'), "", parallel=parallel)
        begin, end = f"{self.begins[0]}\n", f"{TOKEN}</tool_call>"
        return f"{lark.text(begin)} {calls} {lark.text(end)}"


def _items(schema: Any) -> Any:
    return schema.get("items") if isinstance(schema, Mapping) else None


MINIMAX_M3 = Nested()
