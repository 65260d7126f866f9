"""Gemma 4 and FunctionGemma: call:f{key:value,...}, strings between marks of their own.

Source: the chat templates of google/gemma-4 (<|tool_call>call:f{...}<tool_call|>, strings between
<|"|>) and google/functiongemma (<start_function_call>call:f{...}<end_function_call>, strings
between <escape>). Keys are bare, or strings; lists, objects, numbers, true, false as in JSON.
"""

import json
import re
from collections.abc import Mapping

from ..reader import Malformed, Parse, TextReader, compiled
from .format import CallWriter, ToolFormat
from .lark import Lark
from .schema import Tool, Toolbox, enum_values, standalone_schema
from .values import MAX_DEPTH, MAX_KEY, Emit, copy_items, within_quotes

_NAME = compiled(r"[\w.:/-]+")
_BARE_KEY = compiled(r"\w+")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
PLAIN = frozenset(("integer", "number", "boolean", "null"))  # written as in JSON
_NOTHING = {"true": "true", "false": "false", "null": "null", "none": "null"}


class Gemma(ToolFormat):
    """One call between marks.

    Args:
        begin: the mark before a call.
        end: the mark after a call.
        quote: the mark before and after a string.
    """

    def __init__(self, name: str, begin: str, end: str, quote: str) -> None:
        self.name = name  # type: ignore[misc]  # one class, two formats
        self.begins = (begin,)  # type: ignore[misc]
        self.ends = (end, quote)  # type: ignore[misc]
        self._end, self._quote = end, quote

    def read(self, reader: TextReader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read one call; a missing end mark is tolerated."""
        yield from reader.space()
        yield from reader.expect("call:")
        name = yield from reader.whole_run(_NAME)
        if not name or (yield from reader.peek()) != "{":
            raise Malformed("a call without a name or arguments")
        calls.begin(name)
        yield from self._object(reader, calls.arguments, 0)
        calls.end()
        yield from reader.space()
        if (yield from reader.accept(self._end)):
            reader.commit()

    def _value(self, reader: TextReader, emit: Emit, depth: int) -> Parse[None]:
        if depth > MAX_DEPTH:
            raise Malformed(f"more than {MAX_DEPTH} objects and lists within each other")
        first = yield from reader.peek()
        if first == "{":
            yield from self._object(reader, emit, depth)
        elif first == "[":
            yield from copy_items(reader, emit, "]", lambda: self._value(reader, emit, depth + 1))
        elif (yield from reader.accept(self._quote)):
            yield from self._string(reader, emit)
        else:
            emit(_bare((yield from reader.until(",", "}", "]", limit=MAX_KEY)).strip()))

    def _object(self, reader: TextReader, emit: Emit, depth: int) -> Parse[None]:
        def member() -> Parse[None]:
            yield from self._key(reader, emit)
            yield from reader.space()
            yield from self._value(reader, emit, depth + 1)

        yield from copy_items(reader, emit, "}", member)

    def _key(self, reader: TextReader, emit: Emit) -> Parse[None]:
        if (yield from reader.accept(self._quote)):
            yield from self._string(reader, emit)
            yield from reader.space()
            yield from reader.expect(":")
        else:
            key = (yield from reader.until(":", limit=MAX_KEY)).strip()
            reader.take()
            emit(json.dumps(key, ensure_ascii=False))
        emit(": ")

    def _string(self, reader: TextReader, emit: Emit) -> Parse[None]:
        """Read a string after its first mark; it has no escapes."""
        emit('"')
        yield from reader.pass_until((self._quote,), lambda piece: emit(within_quotes(piece)))
        reader.take(len(self._quote))
        emit('"')

    def _spelled(self, value: object) -> str:
        return f"{self._quote}{value}{self._quote}" if isinstance(value, str) else json.dumps(value)

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Parameters by their schemas; of lists and objects the type alone.

        The values inside those are not JSON, since strings stand between marks, so their schemas
        cannot be compiled.
        """
        number, any_value = lark.rule(f"/{_NUMBER.pattern}/"), lark.name()
        string = f"{lark.text(self._quote)} {lark.free_text(self._quote)}"
        pair = lark.rule(f'(/[A-Za-z_][A-Za-z0-9_]*/ | {string}) ":" {any_value}')
        items = lark.rule(f'"[" ({any_value} ("," {any_value})*)? "]"')
        members = lark.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')
        lark.rule(f'{string} | {number} | "true" | "false" | {items} | {members}', name=any_value)
        of_type = {"string": string, "array": items, "object": members}

        def value_of(tool: Tool, name: str) -> str:
            schema, types = tool.properties[name], tool.types_of(name)
            values = enum_values(schema, tool.parameters)
            if values and not any(isinstance(value, (Mapping, list)) for value in values):
                return lark.one_of([lark.text(self._spelled(value)) for value in values])
            if types and types <= PLAIN:
                return lark.json(standalone_schema(schema, tool.parameters))
            options = [of_type.get(kind, lark.json({"type": kind})) for kind in sorted(types)]
            return lark.one_of(options) if options else any_value

        def call_rule(tool: Tool) -> str:
            def pair_of(name: str) -> str:
                key = name if _BARE_KEY.fullmatch(name) else f"{self._quote}{name}{self._quote}"
                return f"{lark.text(f'{key}:')} {value_of(tool, name)}"

            head = lark.text(f"{self.begins[0]}call:{tool.name}{{")
            return f"{head} {lark.arguments(tool, pair_of, ',')} {lark.text('}' + self._end)}"

        call = lark.one_of([call_rule(tool) for tool in tools.alternatives()])
        return lark.repeated(call, "", parallel=parallel)


def _bare(word: str) -> str:
    """Return the JSON of a value without quotes: a number or a constant, else a string."""
    if word.lower() in _NOTHING:
        return _NOTHING[word.lower()]
    if _NUMBER.fullmatch(word):
        try:
            return json.dumps(json.loads(word), allow_nan=False)
        except ValueError:  # leading zeros, or beyond what a number can be
            return json.dumps(word)
    if not word:
        raise Malformed("a key without a value")
    return json.dumps(word, ensure_ascii=False)


GEMMA4 = Gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
