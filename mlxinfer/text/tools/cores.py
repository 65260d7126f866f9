"""The four ways in which a model writes the name and the arguments of a call.

They are a JSON object, a name before a JSON object, a name before parameters one by one, and
Python's syntax. Each is a `CallCore`: it reads such a call, and makes the grammar of one. The marks
around calls are in `template_format.py`.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import InvalidRequestError
from ..reader import MAX_WORD, Malformed, Parse, TextReader, compiled
from .format import CallWriter, WrittenCall
from .lark import Lark, value_rule
from .marks import (
    exact_text,
    expect_text,
    expect_words,
    first_word,
    pattern_of,
    skip_text,
    words_of,
)
from .schema import ArgumentSchema, Tool, Toolbox, json_of, standalone_schema
from .values import copy_literal, copy_value, read_string, read_value, within_quotes

NAME, ARGUMENT_OBJECT = "\0name\0", "\0arguments\0"  # within the text of a call, as ID
_NAMES = ("name", "function", "tool_name")  # keys of the name that are read in any JSON object
_ARGUMENTS = ("arguments", "parameters")
_CDATA = ("<![CDATA[", "]]>")
_NAME = compiled(r"[\w.:/-]+")
_KEY = compiled(r"[\w.:/$@-]+")  # tools have more names than Python does
_TYPE_WORDS = {  # the word for strings -> the words for the other JSON types
    "string": {},
    "str": {"integer": "int", "number": "float", "boolean": "bool", "array": "list"}
    | {"object": "dict", "null": "None"},
    "true": dict.fromkeys(("integer", "number", "boolean", "array", "object", "null"), "false"),
}


class CallCore(ABC):
    """The part of a call that has its name and its arguments.

    Attributes:
        starts: a pattern of the first character of a call that follows another without a mark;
            "": a call could begin with any text.
    """

    __slots__ = ()
    starts: ClassVar[str] = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def read(
        self, reader: TextReader, calls: CallWriter, *, bare: bool, opened: bool
    ) -> Parse[None]:
        """Read one call and end it; raise Malformed where there is none."""

    @abstractmethod
    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """Return what matches one call."""

    @abstractmethod
    def write(self, call: WrittenCall) -> str:
        """Return a call of an earlier turn."""


# -- JSON -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectCore(CallCore):
    """A JSON object with a member for the name and one for the arguments."""

    starts: ClassVar[str] = "\\{"
    pattern: str  # its text, with NAME, ARGUMENT_OBJECT and ID in their places
    name_key: str  # the key of the name
    arguments_key: str  # the key of the arguments

    def read(
        self, reader: TextReader, calls: CallWriter, *, bare: bool, opened: bool
    ) -> Parse[None]:
        if not opened:
            yield from reader.expect("{")
        keys = ((self.name_key, *_NAMES), (self.arguments_key, *_ARGUMENTS))
        yield from _CallObject(reader, calls, keys, bare=bare).read()

    def write(self, call: WrittenCall) -> str:
        name = json.dumps(call.name, ensure_ascii=False)[1:-1]
        return self.pattern.replace(NAME, name).replace(ARGUMENT_OBJECT, call.text)

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """Return what matches the object, with its members in the template's order."""

        def term(piece: str, tool: Tool) -> str:
            if piece == ARGUMENT_OBJECT:
                return lark.parameters(tool)
            return exact_text(lark, tool.name if piece == NAME else piece)

        pieces = re.split(f"({NAME}|{ARGUMENT_OBJECT})", self.pattern)
        return lark.one_of(
            [" ".join(term(piece, tool) for piece in pieces if piece) for tool in tools]
        )


class _CallObject:
    """Reads a call's object; arguments are passed on as they arrive if the name came before them.

    Arguments may also be null, or JSON within a string. Other keys, such as "type" or "id", are
    skipped. A "function" object inside, as OpenAI's API has it, is read as the call.
    """

    def __init__(
        self,
        reader: TextReader,
        calls: CallWriter,
        keys: tuple[Sequence[str], Sequence[str]],
        *,
        bare: bool,
    ) -> None:
        self._reader, self._calls, self._bare = reader, calls, bare
        self._name_keys, self._argument_keys = keys
        self._name = ""
        self._held: str | None = None  # arguments that came before the name

    def read(self) -> Parse[None]:
        yield from self._members()
        if not self._name:
            raise Malformed("a call without a name")
        if not self._calls.is_open:
            self._calls.begin(self._name)
            yield from copy_arguments(TextReader.of(self._held or "{}"), self._calls)
        self._calls.end()

    def _members(self) -> Parse[None]:
        reader = self._reader
        mark = ","
        while mark == ",":
            yield from reader.space()
            key = yield from read_string(reader)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            yield from self._member(key)
            yield from reader.space()
            mark = yield from reader.expect(",", "}")

    def _member(self, key: str) -> Parse[None]:
        first = yield from self._reader.peek()
        if key == "function" and first == "{" and not self._name:
            self._reader.take()
            yield from self._members()
        elif key in self._name_keys and first == '"' and not self._name:
            self._name = yield from read_string(self._reader)
            if self._bare:
                self._calls.require_known(self._name)
        elif key in self._argument_keys:
            yield from self._arguments(first)
        else:
            yield from read_value(self._reader)

    def _arguments(self, first: str) -> Parse[None]:
        if self._held is not None or self._calls.is_open:
            raise Malformed("arguments twice")
        if first == "{" and self._name:
            self._calls.begin(self._name)
            yield from copy_arguments(self._reader, self._calls)
            return
        text = yield from read_value(self._reader)
        self._held = text if first == "{" else _unwrapped(text)


def _unwrapped(text: str) -> str:
    """Return the object within a JSON string, {} for none; raise Malformed for anything else."""
    try:
        value = json.loads(text)
    except ValueError:  # a number of more digits than Python reads
        raise Malformed("the arguments are no object") from None
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        reader = TextReader.of(value.strip())
        pieces: list[str] = []
        steps = copy_value(reader, pieces.append)
        assert next(steps, "done") == "done", "a closed reader waits for nothing"
        if "".join(pieces)[0] == "{":
            return "".join(pieces)
    raise Malformed("the arguments are no object")


def read_arguments(reader: TextReader, calls: CallWriter, name: str) -> Parse[None]:
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise Malformed("the arguments are no object")
    calls.begin(name)
    yield from copy_arguments(reader, calls)
    calls.end()


def copy_arguments(reader: TextReader, calls: CallWriter) -> Parse[None]:
    """Read the arguments of the open call; quoted numbers become numbers where they have to be."""
    schema = calls.tools.get(calls.name).parameters
    yield from copy_value(reader, calls.arguments, place=ArgumentSchema(schema, schema))


@dataclass(frozen=True, slots=True)
class NamedCore(CallCore):
    """A name, a text, and the arguments as a JSON object."""

    after_name: str

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.after_name,)

    def read(
        self, reader: TextReader, calls: CallWriter, *, bare: bool, opened: bool
    ) -> Parse[None]:
        words = words_of(self.after_name)
        tags = [number for number, word in enumerate(words) if word[0] in "<["]
        first = tags[0] if tags else 0  # up to here the words may stand in a name too
        text = yield from reader.until(words[first] if words else "{", limit=MAX_WORD)
        match = re.fullmatch(rf"(.+){pattern_of(words[:first])}\s*", text, re.DOTALL)
        yield from expect_words(reader, words[first:])
        yield from read_arguments(reader, calls, _checked_name(match[1] if match else ""))

    def write(self, call: WrittenCall) -> str:
        return f"{call.name}{self.after_name}{call.text}"

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        options = [
            f"{exact_text(lark, t.name + self.after_name)} {lark.parameters(t)}" for t in tools
        ]
        return lark.one_of(options)


def _checked_name(text: str) -> str:
    name = text.strip()
    if not _NAME.fullmatch(name):
        raise Malformed(f"{name!r} is no name")
    return name


# -- parameters one by one ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParameterCore(CallCore):
    """A name, then each parameter as a key and a value between marks."""

    after_name: str  # text after the name
    begin: str  # text before a key
    # texts between key and value; between the two of them stands the type of the value. Without
    # types the second is "".
    middle: tuple[str, str]
    end: str  # text after a value
    stops: tuple[str, ...]  # one of these words follows the last parameter
    # the type of a string and of a whole number; "": types are not written
    type_words: tuple[str, str] = ("", "")

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.after_name, self.begin, *self.middle, self.end)

    def read(
        self, reader: TextReader, calls: CallWriter, *, bare: bool, opened: bool
    ) -> Parse[None]:
        begin, end = first_word(self.begin), first_word(self.end)
        after = first_word(self.after_name)
        name = yield from reader.until(
            *((after,) if after else (begin, *self.stops)), limit=MAX_WORD
        )
        yield from expect_text(reader, self.after_name)
        calls.begin(_checked_name(name))
        trim = self.middle[1 if self.type_words[0] else 0].endswith("\n")
        arguments = _ParameterWriter(reader, calls, trim=trim)
        # Qwen3-Coder at times leaves the end mark out; `<parameter=` is no XML, so no value has it
        ends = [end, begin, *self.stops] if begin.endswith("=") else [end]
        yield from reader.space()
        while (yield from reader.accept(begin)):
            yield from expect_text(reader, self.begin.lstrip().removeprefix(begin))
            key = yield from reader.until(first_word(self.middle[0]), limit=MAX_WORD)
            yield from expect_text(reader, self.middle[0])
            is_string = None
            if self.type_words[0]:
                word = yield from reader.until(first_word(self.middle[1]), limit=MAX_WORD)
                is_string = word == self.type_words[0]
                yield from expect_text(reader, self.middle[1])
            yield from arguments.value(key.strip(), ends, is_string=is_string)
            if len(ends) > 1:
                yield from skip_text(reader, self.end)
            else:
                yield from expect_text(reader, self.end)
            yield from reader.space()
        if (yield from reader.ahead(self.stops)) is None:
            raise Malformed(f"expected {' or '.join(self.stops)}")
        arguments.end()

    def write(self, call: WrittenCall) -> str:
        return call.name + self.after_name + "".join(map(self._written, call.items.items()))

    def _written(self, item: tuple[str, Any]) -> str:
        key, value = item
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        word = self.type_words[0 if isinstance(value, str) else 1]
        return f"{self.begin}{key}{self.middle[0]}{word}{self.middle[1]}{text}{self.end}"

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """Return what matches parameters in the schema's order, required ones first."""

        def call(tool: Tool) -> str:
            def parameter(name: str) -> str:
                head = self.begin + name + self.middle[0] + self._type_of(tool, name)
                value = value_rule(lark, tool, name, self.end)
                return f"{lark.text(head + self.middle[1])} {value}"

            head = exact_text(lark, tool.name + self.after_name)
            return f"{head} {lark.arguments(tool, parameter)}"

        return lark.one_of([call(tool) for tool in tools.alternatives()])

    def _type_of(self, tool: Tool, name: str) -> str:
        string, number = self.type_words
        types = tool.types_of(name) or {"string"}
        if not string or "string" in types:
            return string
        kind = min(types)
        return number if kind == "integer" else _TYPE_WORDS[string].get(kind, kind)


def are_type_words(string: str, other: str) -> bool:
    """Whether these can be the types of a string and of a whole number, as words."""
    words = _TYPE_WORDS.get(string)
    return words is not None and other in [words.get(kind, kind) for kind in ("integer", "number")]


class _ParameterWriter:
    """Writes the parameters of one call as one JSON object while they arrive.

    A value that can only be a string is passed on as it arrives; others once they are complete,
    since only then their type is known.

    Args:
        calls: receives the JSON; the call has begun.
        trim: one line break after the tag before a value, and one before the tag after it, belong
            to the tags.
    """

    def __init__(self, reader: TextReader, calls: CallWriter, *, trim: bool) -> None:
        self._reader, self._calls, self._trim = reader, calls, trim
        self._tool = calls.tools.get(calls.name)
        self._names: set[str] = set()
        calls.arguments("{")

    def value(self, name: str, ends: Sequence[str], *, is_string: bool | None) -> Parse[None]:
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
        if (yield from self._reader.accept(_CDATA[0])):
            text = yield from self._reader.until(_CDATA[1])
            self._reader.take(len(_CDATA[1]))
            yield from self._reader.space()
        else:
            text = yield from self._reader.until(*ends)
        if self._trim:
            text = text.removesuffix("\n")
        self._calls.arguments(json_of(text, types))

    def end(self) -> None:
        self._calls.arguments("}")
        self._calls.end()

    def _stream(self, ends: Sequence[str]) -> Parse[None]:
        stops = [*ends, *(f"\n{end}" for end in ends)] if self._trim else list(ends)
        self._calls.arguments('"')
        if (yield from self._reader.accept(_CDATA[0])):  # around values with markup: MiniCPM5
            yield from self._reader.pass_until(
                (_CDATA[1],), lambda piece: self._calls.arguments(within_quotes(piece))
            )
            self._reader.take(len(_CDATA[1]))
            yield from self._reader.space()
            self._calls.arguments('"')
            return
        stop = yield from self._reader.pass_until(
            stops, lambda piece: self._calls.arguments(within_quotes(piece))
        )
        self._reader.take(len(stop) - len(stop.removeprefix("\n")))
        self._calls.arguments('"')


# -- Python ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PythonCore(CallCore):
    """A call as Python writes it: f(a=1, b="x"). Positional arguments have no place in JSON."""

    starts: ClassVar[str] = "[A-Za-z_]"

    def read(
        self, reader: TextReader, calls: CallWriter, *, bare: bool, opened: bool
    ) -> Parse[None]:
        yield from reader.space()
        name = yield from reader.whole_run(_NAME)
        yield from reader.expect("(")
        if bare:
            calls.require_known(name)
        calls.begin(name)
        calls.arguments("{")
        names: set[str] = set()
        yield from reader.space()
        while not (yield from reader.accept(")")):
            if names:
                yield from reader.expect(",")
                yield from reader.space()
                if (yield from reader.accept(")")):
                    break
            yield from self._keyword(reader, calls, names)
            yield from reader.space()
        calls.arguments("}")
        calls.end()

    def _keyword(self, reader: TextReader, calls: CallWriter, names: set[str]) -> Parse[None]:
        key = yield from reader.whole_run(_KEY)
        if not key or key in names:
            raise Malformed("an argument without a name, or twice the same")
        yield from reader.space()
        yield from reader.expect("=")
        calls.arguments(f"{', ' if names else ''}{json.dumps(key, ensure_ascii=False)}: ")
        names.add(key)
        yield from copy_literal(reader, calls.arguments)

    def write(self, call: WrittenCall) -> str:
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.items.items())})"

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """Return what matches a call; its values are JSON, a near subset of Python."""

        def call(tool: Tool) -> str:
            def keyword(name: str) -> str:
                if not _KEY.fullmatch(name):
                    raise InvalidRequestError(
                        f"The tool {tool.name!r} cannot be forced on this model: its calls are "
                        f"Python's, which have no way to name the parameter {name!r}.",
                        param="tools",
                    )
                schema = standalone_schema(tool.properties[name], tool.parameters)
                return f"{lark.text(f'{name}=')} {lark.json(schema)}"

            arguments = lark.arguments(tool, keyword, ", ")
            return f"{lark.text(f'{tool.name}(')} {arguments} {lark.text(')')}"

        return lark.one_of([call(tool) for tool in tools.alternatives()])
