"""One value, JSON (RFC 8259) or a Python literal, read from arriving text and passed on as JSON.

JSON is passed on piece by piece, a Python literal once it is complete. The output is valid JSON
even where models are careless: line breaks and other control characters within strings are escaped.
Text that is no value raises Malformed, and so does a Python expression that would have to be
computed.
"""

import ast
import json
import math
import re
from collections.abc import Callable
from typing import Protocol

from ..reader import Malformed, Parse, TextReader

Emit = Callable[[str], object]


class ArgumentType(Protocol):
    """What is known of a value before it arrives; see `schema.ArgumentSchema`."""

    def conversion(self) -> Callable[[str], str] | None:
        """Return what makes the JSON of a string; None if the value may be a string."""

    def member(self, name: str) -> "ArgumentType": ...

    def item(self) -> "ArgumentType": ...


MAX_DEPTH = 64
MAX_KEY = 1024  # characters of a key or of a name
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_HEX = re.compile(r"[0-9A-Fa-f]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HALF = re.compile("[\ud800-\udfff]")
LOST = "\\ufffd"  # as JSON spells what stands for a half of a surrogate pair
_LITERALS = {"true": "boolean", "false": "boolean", "null": "null"}
_QUOTES = ('"""', "'''", '"', "'")
_UNQUOTED = {quote: re.compile(f"[^\\\\{quote}]+") for quote in "\"'"}
_CODE = re.compile(r"""[^"'()\[\]{},]+""")
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPES = frozenset("\\'\"abfnrtvxuU01234567\n")  # Python keeps the backslash before others
_CONSTANTS = {"true": True, "false": False, "null": None}  # Python's, as JSON spells them


def copy_value(
    reader: TextReader, emit: Emit, depth: int = 0, place: ArgumentType | None = None
) -> Parse[str]:
    """Read a value and pass its text on; return its type: object, array, string, number, ...

    Where `place` says that a value is no string, what stands between quotes becomes that value.
    """
    if depth > MAX_DEPTH:
        raise Malformed(f"more than {MAX_DEPTH} objects and lists within each other")

    def member() -> Parse[None]:
        key: list[str] = []
        yield from copy_string(reader, key.append)
        emit("".join(key))
        yield from reader.space()
        yield from reader.expect(":")
        emit(": ")
        yield from reader.space()
        inner = place.member(json.loads("".join(key))) if place else None
        yield from copy_value(reader, emit, depth + 1, inner)

    first = yield from reader.peek()
    if first == "{":
        yield from copy_items(reader, emit, "}", member)
        return "object"
    if first == "[":
        inner = place.item() if place else None
        yield from copy_items(reader, emit, "]", lambda: copy_value(reader, emit, depth + 1, inner))
        return "array"
    if first == '"':
        convert = place.conversion() if place else None
        text: list[str] = []
        yield from copy_string(reader, text.append if convert else emit)
        if convert:
            emit(convert(json.loads("".join(text))))
        return "string"
    word = yield from reader.whole_run(_WORD)
    if word not in _LITERALS and not _NUMBER.fullmatch(word):
        raise Malformed(f"{word!r} is no JSON value")
    if word not in _LITERALS and not math.isfinite(float(word)):
        emit(json.dumps(word))  # readers know no such number, and nothing is to be lost
        return "string"
    emit(word)
    return _LITERALS.get(word, "number")


def read_value(reader: TextReader) -> Parse[str]:
    pieces: list[str] = []
    yield from copy_value(reader, pieces.append)
    return "".join(pieces)


def read_string(reader: TextReader) -> Parse[str]:
    pieces: list[str] = []
    yield from copy_string(reader, pieces.append)
    text = "".join(pieces)
    if len(text) > MAX_KEY:
        raise Malformed(f"a key or a name of more than {MAX_KEY} characters")
    said: str = json.loads(text)
    return said


def copy_string(reader: TextReader, emit: Emit) -> Parse[None]:
    yield from reader.expect('"')
    emit('"')
    while True:
        piece = yield from reader.run(_PLAIN)
        if piece:
            emit(piece)
            continue
        if not (yield from reader.more()):
            raise Malformed("the text ended within a string")
        char = reader.take()
        if char == '"':
            emit(char)
            return
        emit((yield from _escape(reader)) if char == "\\" else json.dumps(char)[1:-1])


def without_halves(text: str) -> str:
    """Return the text with U+FFFD for halves of surrogate pairs, which cannot be encoded."""
    return _HALF.sub("\ufffd", text)


def _escape(reader: TextReader) -> Parse[str]:
    """Read what follows a backslash; a half of a surrogate pair becomes U+FFFD."""
    said, high = "", ""
    while True:
        char = yield from reader.expect(*'"\\/bfnrtu')
        code = (yield from _hex_digits(reader)) if char == "u" else ""
        is_low = bool(code) and 0xDC00 <= int(code, 16) < 0xE000
        if high and is_low:
            return f"{said}\\u{high}\\u{code}"
        if high:
            said += LOST
        if not code:
            return f"{said}\\{char}"
        if is_low:
            return said + LOST
        if not 0xD800 <= int(code, 16) < 0xDC00:
            return f"{said}\\u{code}"
        high = code
        if not (yield from reader.accept("\\")):
            return said + LOST


def _hex_digits(reader: TextReader) -> Parse[str]:
    digits = ""
    while len(digits) < 4:
        digit = yield from reader.peek()
        if not _HEX.fullmatch(digit):
            raise Malformed("a \\u escape without four hexadecimal digits")
        digits += reader.take()
    return digits


def copy_items(
    reader: TextReader, emit: Emit, end: str, item: Callable[[], Parse[object]]
) -> Parse[None]:
    """Read a bracket, items with commas between them, and the closing bracket; pass them on."""
    emit(reader.take())
    yield from reader.space()
    first = True
    while not (yield from reader.accept(end)):
        if not first:
            yield from reader.expect(",")
            yield from reader.space()
            emit(", ")
        yield from item()
        yield from reader.space()
        first = False
    emit(end)


def within_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def python_to_json(text: str) -> str | None:
    reader = TextReader.of(text.strip())
    pieces: list[str] = []
    try:
        for _ in copy_literal(reader, pieces.append, may_end=True):
            raise AssertionError("a closed reader waits for nothing")
    except Malformed:
        return None
    return "".join(pieces) if reader.at_end else None


def copy_literal(reader: TextReader, emit: Emit, *, may_end: bool = False) -> Parse[None]:
    """Read a Python literal up to a comma or a bracket that is not its own; pass it on as JSON.

    With `may_end` it may also reach up to the end of the text.
    """
    pieces: list[str] = []
    depth = 0
    while True:
        char = yield from reader.peek()
        if char in ("'", '"'):
            yield from _copy_python_string(reader, pieces.append)
        elif piece := (yield from reader.run(_CODE)):
            pieces.append(piece)
        elif char in ("(", "[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise Malformed(f"more than {MAX_DEPTH} lists and dicts within each other")
            pieces.append(reader.take())
        elif char and depth:
            depth -= char != ","
            pieces.append(reader.take())
        else:
            break
    if depth or not (char or may_end):
        raise Malformed("the text ended within a value")
    emit(_json_of_literal("".join(pieces)))


def _copy_python_string(reader: TextReader, emit: Emit) -> Parse[None]:
    """Read a string and pass it on in Python's syntax, with its control characters escaped."""
    quote = yield from reader.expect(*_QUOTES)
    emit(quote)
    if quote in ('"', "'") and (yield from reader.accept(quote)):
        emit(quote)
        return
    while not (yield from reader.accept(quote)):
        piece = yield from reader.run(_UNQUOTED[quote[0]])
        if not piece:
            if not (yield from reader.more()):
                raise Malformed("the text ended within a string")
            piece = reader.take()
        if piece == "\\":
            char = yield from reader.peek()
            emit("\\" + reader.take() if char in _ESCAPES else "\\\\")
        else:
            emit(_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", piece))
    emit(quote)


def _json_of_literal(text: str) -> str:
    try:
        value = _value_of(ast.parse(text.strip(), mode="eval").body)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed("this is no Python literal") from None
    # two halves of a surrogate pair are one character, and one half is none
    return written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _value_of(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value_of(k): _value_of(v) for k, v in zip(keys, values, strict=True) if k}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=value)):
            if type(value) in (int, float):
                return -value if isinstance(sign, ast.USub) else value  # type: ignore[operator]
    raise ValueError
