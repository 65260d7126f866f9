"""A tool-call format that was read off a chat template: its marks are data, not code.

What stands around calls is a `CallSyntax`; how a call has its name and its arguments is one of four
cores: a JSON object, a name before JSON, a name before its parameters one by one, or Python's
syntax. White space in marks is flexible when calls are read, and exact when they are forced.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .format import CallWriter, Clues, ToolFormat, require_known
from .json_calls import ARGUMENTS, NAMES, read_arguments, read_call
from .lark import Lark, value_rule
from .pythonic import call_rule, read_one
from .reader import MAX_WORD, Malformed, Parse, Reader
from .schema import Tool, Toolbox
from .xml_calls import XmlArguments

NAME, ARGUMENT_OBJECT, ID = "\0name\0", "\0arguments\0", "\0id\0"  # within the text of a call
COUNT = "\0count\0"  # a number that counts calls, within a mark
_WORD = re.compile(r"\0count\0|<[^<>\s\0]*>?|\[[A-Z_/]+\]|[^\s<\[\0]+|\[")
_DIGITS = re.compile("[0-9]+")
_NAME = re.compile(r"[\w.:/-]+")
_TYPE_WORDS = {  # a word for strings -> words for the other JSON types
    "string": {},
    "str": {"integer": "int", "number": "float", "boolean": "bool", "array": "list"}
    | {"object": "dict", "null": "None"},
    "true": dict.fromkeys(("integer", "number", "boolean", "array", "object", "null"), "false"),
}


def words_of(text: str) -> list[str]:
    """Return the marks of a text in order, without white space: tags, COUNT, and other runs."""
    return _WORD.findall(text)


def first_word(*texts: str) -> str:
    """Return the first mark of these texts joined, "" where all are blank."""
    return next(iter(words_of("".join(texts))), "")


def expect_text(reader: Reader, text: str) -> Parse[None]:
    """Read a text, but for white space; raise Malformed if anything else stands here."""
    for word in words_of(text):
        yield from reader.space()
        if word == COUNT:
            yield from reader.whole_run(_DIGITS)
        else:
            yield from reader.expect(word)


def accept_text(reader: Reader, text: str) -> Parse[bool]:
    """Read a text if its first mark stands here; return whether it did. A blank text is no text."""
    first = first_word(text)
    yield from reader.space()
    if not first or (yield from reader.accept(first)) is None:
        return False
    yield from expect_text(reader, without_first(text))
    return True


def without_first(text: str) -> str:
    """Return the text after its first mark."""
    return text.lstrip().removeprefix(first_word(text))


def exact_text(lark: Lark, text: str) -> str:
    """Return what matches a text, with a number for COUNT."""
    pieces = text.split(COUNT)
    number = f" {lark.rule('/[0-9]{1,4}/')} " if len(pieces) > 1 else ""
    return number.join(map(lark.text, pieces))


class CallCore(Protocol):
    """The part of a call that has its name and its arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The literal texts of a call."""
        ...

    @property
    def starts(self) -> str:
        """A pattern of the first character of a call, which may follow another without a mark."""
        ...

    def read(self, reader: Reader, calls: CallWriter, *, bare: str, opened: bool) -> Parse[None]:
        """Read one call and end it; raise Malformed where there is none.

        Args:
            reader: the text.
            calls: receives the call.
            bare: the mark where nothing but a declared name distinguishes a call from text; or "".
            opened: the first character has been read.
        """
        ...

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """Return what matches one call."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectCore:
    """A JSON object with a member for the name and one for the arguments.

    Attributes:
        pattern: its text, with NAME, ARGUMENT_OBJECT and ID in their places.
        name_key: the key of the name.
        arguments_key: the key of the arguments.
    """

    pattern: str
    name_key: str
    arguments_key: str

    @property
    def texts(self) -> tuple[str, ...]:
        """None: JSON has no marks."""
        return ()

    @property
    def starts(self) -> str:
        """Its first character."""
        return "\\{"

    def read(self, reader: Reader, calls: CallWriter, *, bare: str, opened: bool) -> Parse[None]:
        """Read the object."""

        def check(name: str) -> None:
            require_known(calls, name, bare or " ", (bare,))

        keys = ((self.name_key, *NAMES), (self.arguments_key, *ARGUMENTS))
        yield from read_call(reader, calls, check, opened=opened, keys=keys)

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """The members in the template's order."""

        def term(piece: str, tool: Tool) -> str:
            if piece == ARGUMENT_OBJECT:
                return lark.parameters(tool)
            if piece == ID:
                return lark.rule("/[A-Za-z0-9_.:-]{1,64}/")
            return lark.text(tool.name if piece == NAME else piece)

        pieces = [p for p in re.split("(\0[a-z]+\0)", self.pattern) if p]
        return lark.one_of([" ".join(term(piece, tool) for piece in pieces) for tool in tools])


@dataclass(frozen=True, slots=True)
class NamedCore:
    """A name, a text, and the arguments as a JSON object."""

    after_name: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The text after the name."""
        return (self.after_name,)

    @property
    def starts(self) -> str:
        """None: a name could be any text."""
        return ""

    def read(self, reader: Reader, calls: CallWriter, *, bare: str, opened: bool) -> Parse[None]:
        """Read name and arguments."""
        name = yield from reader.until(first_word(self.after_name) or "{", limit=MAX_WORD)
        if not _NAME.fullmatch(name.strip()):
            raise Malformed(f"{name!r} is no name")
        yield from expect_text(reader, self.after_name)
        yield from read_arguments(reader, calls, name.strip())

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """The name and its tool's parameters."""
        options = [
            f"{exact_text(lark, t.name + self.after_name)} {lark.parameters(t)}" for t in tools
        ]
        return lark.one_of(options)


@dataclass(frozen=True, slots=True)
class ParameterCore:
    """A name, then each parameter as a key and a value between marks.

    Attributes:
        after_name: text after the name.
        begin: text before a key.
        middle: texts between key and value; between the two of them stands the type of the value.
            Without types the second is "".
        end: text after a value.
        type_words: the type of a string and of a whole number; "": types are not written.
        stops: words of which one follows after the last parameter.
    """

    after_name: str
    begin: str
    middle: tuple[str, str]
    end: str
    stops: tuple[str, ...]
    type_words: tuple[str, str] = ("", "")

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (self.after_name, self.begin, *self.middle, self.end)

    @property
    def starts(self) -> str:
        """None: a name could be any text."""
        return ""

    def read(self, reader: Reader, calls: CallWriter, *, bare: str, opened: bool) -> Parse[None]:
        """Read the name and parameters up to one of `stops`."""
        after = first_word(self.after_name)
        ends = (after,) if after else (first_word(self.begin), *self.stops)
        name = (yield from reader.until(*ends, limit=MAX_WORD)).strip()
        if not _NAME.fullmatch(name):
            raise Malformed(f"{name!r} is no name")
        yield from expect_text(reader, self.after_name)
        calls.begin(name)
        trim = self.middle[1 if self.type_words[0] else 0].endswith("\n")
        arguments = XmlArguments(reader, calls, calls.tools.get(name), trim=trim)
        while (yield from accept_text(reader, self.begin)):
            key = yield from reader.until(first_word(self.middle[0]), limit=MAX_WORD)
            yield from expect_text(reader, self.middle[0])
            is_string = None
            if self.type_words[0]:
                word = yield from reader.until(first_word(self.middle[1]), limit=MAX_WORD)
                is_string = word == self.type_words[0]
                yield from expect_text(reader, self.middle[1])
            stop = first_word(self.end)
            yield from arguments.value(key.strip(), [stop], is_string=is_string)
            yield from expect_text(reader, self.end)
        if (yield from reader.ahead(self.stops)) is None:
            raise Malformed(f"expected {' or '.join(self.stops)}")
        arguments.end()

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """Parameters in the schema's order, required ones first."""

        def call(tool: Tool) -> str:
            def parameter(name: str) -> str:
                head = self.begin + name + self.middle[0] + self._type_of(tool, name)
                value = value_rule(lark, tool, name, self.end)
                return f"{lark.text(head + self.middle[1])} {value}"

            head = exact_text(lark, tool.name + self.after_name)
            return f"{head} {lark.arguments(tool, parameter)}"

        return lark.one_of([call(tool) for tool in tools.alternatives()])

    def _type_of(self, tool: Tool, name: str) -> str:
        """Return the word for a parameter's type, "" where types are not written."""
        string, number = self.type_words
        types = tool.types_of(name) or {"string"}
        if not string or "string" in types:
            return string
        kind = min(types)
        return number if kind == "integer" else _TYPE_WORDS[string].get(kind, kind)


@dataclass(frozen=True, slots=True)
class PythonCore:
    """A call as Python writes it: f(a=1, b="x")."""

    @property
    def texts(self) -> tuple[str, ...]:
        """None: it has no marks."""
        return ()

    @property
    def starts(self) -> str:
        """Its first character."""
        return "[A-Za-z_]"

    def read(self, reader: Reader, calls: CallWriter, *, bare: str, opened: bool) -> Parse[None]:
        """Read one call."""
        yield from reader.space()
        yield from read_one(reader, calls, bare or " ", (bare,))

    def rule(self, lark: Lark, tools: Toolbox) -> str:
        """Values are JSON, a near subset of Python."""
        return lark.one_of([call_rule(lark, tool) for tool in tools.alternatives()])


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What stands around calls.

    Attributes:
        section: texts before the first and after the last call.
        call: texts before and after each call.
        between: text between two calls.
        single: an answer has one call.
    """

    section: tuple[str, str]
    call: tuple[str, str]
    between: str = ""
    single: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return (*self.section, *self.call, self.between)


class TemplateFormat(ToolFormat):
    """Calls as one template writes them.

    Args:
        syntax: what stands around the calls.
        core: how a call has its name and its arguments.

    Raises:
        ValueError: nothing marks a call, not even the beginning of a JSON object.
    """

    name = "template"

    def __init__(self, syntax: CallSyntax, core: CallCore) -> None:
        self.syntax, self.core = syntax, core
        words = (first_word(syntax.section[0]), first_word(syntax.call[0]))
        found = list(dict.fromkeys(word for word in words if word))
        if not found and isinstance(core, ObjectCore):
            found = ["{"]
        if not found:
            raise ValueError("nothing marks a call")
        self.begins = tuple(w for w in found if w not in ("{", "["))  # type: ignore[misc]
        self.bare = tuple(w for w in found if w in ("{", "["))  # type: ignore[misc]
        texts = [t.strip() for text in (*syntax.texts, *core.texts) for t in text.split(COUNT)]
        self.ends = tuple(dict.fromkeys(text for text in texts if text))  # type: ignore[misc]

    def detect(self, clues: Clues) -> bool:
        """Never: it belongs to one template."""
        return False

    def read(self, reader: Reader, calls: CallWriter, mark: str) -> Parse[None]:
        """Read a section or one call; missing end marks are tolerated."""
        syntax = self.syntax
        bare = mark if mark in self.bare else ""
        opened = bare == "{"
        if mark == first_word(syntax.section[0]):
            yield from expect_text(reader, without_first(syntax.section[0]))
            yield from expect_text(reader, syntax.call[0])
        elif not opened:
            yield from expect_text(reader, without_first(syntax.call[0]))
        while True:
            if not opened:
                yield from reader.space()
            yield from self.core.read(reader, calls, bare=bare, opened=opened)
            opened = False
            if (yield from accept_text(reader, syntax.call[1])):
                reader.commit()
            if not (yield from self._another(reader)):
                break
        if (yield from accept_text(reader, syntax.section[1])):
            reader.commit()

    def _another(self, reader: Reader) -> Parse[bool]:
        """Read what stands before a further call; return whether it was there."""
        if self.syntax.single:
            return False
        gap = f"{self.syntax.between} {self.syntax.call[0]}"
        if first_word(gap):
            return (yield from accept_text(reader, gap))
        yield from reader.space()
        following = yield from reader.peek()
        return bool(self.core.starts and re.match(self.core.starts, following))

    def grammar(self, lark: Lark, tools: Toolbox, *, parallel: bool) -> str:
        """Calls as the template writes them."""
        syntax = self.syntax
        begin, end = map(lark.text, syntax.call)
        call = lark.rule(f"{begin} {self.core.rule(lark, tools)} {end}")
        calls = lark.repeated(call, syntax.between, parallel=parallel and not syntax.single)
        return f"{lark.text(syntax.section[0].lstrip())} {calls} {lark.text(syntax.section[1])}"


def type_words(string: str, other: str) -> bool:
    """Whether these can be the types of a string and of a whole number, as words."""
    words = _TYPE_WORDS.get(string)
    if words is None:
        return False
    return other in _numbers(words)


def _numbers(words: dict[str, str]) -> Iterator[str]:
    yield from (words.get(kind, kind) for kind in ("integer", "number"))
