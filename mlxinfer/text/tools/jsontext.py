"""One JSON value (RFC 8259) read from arriving text and passed on piece by piece.

The output is valid JSON where models are careless, too: line breaks and other control characters
within strings are escaped. Other text that is no JSON raises Malformed.
"""

import json
import math
import re
from collections.abc import Callable

from .reader import Malformed, Parse, Reader

Emit = Callable[[str], object]

MAX_DEPTH = 64
MAX_KEY = 1024  # characters of a key or of a name
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_HEX = re.compile(r"[0-9A-Fa-f]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HALF = re.compile("[\ud800-\udfff]")
LOST = "\\ufffd"  # as JSON spells what stands for a half of a surrogate pair
_LITERALS = {"true": "boolean", "false": "boolean", "null": "null"}


def copy_value(reader: Reader, emit: Emit, depth: int = 0) -> Parse[str]:
    """Read a value and pass its text on; return its type: object, array, string, number, ..."""
    if depth > MAX_DEPTH:
        raise Malformed(f"more than {MAX_DEPTH} objects and lists within each other")
    first = yield from reader.peek()
    if first == "{":
        yield from _copy_object(reader, emit, depth)
        return "object"
    if first == "[":
        yield from _copy_array(reader, emit, depth)
        return "array"
    if first == '"':
        yield from copy_string(reader, emit)
        return "string"
    word = yield from reader.whole_run(_WORD)
    if word not in _LITERALS and not _NUMBER.fullmatch(word):
        raise Malformed(f"{word!r} is no JSON value")
    if word not in _LITERALS and not math.isfinite(float(word)):
        emit(json.dumps(word))  # readers know no such number, and nothing is to be lost
        return "string"
    emit(word)
    return _LITERALS.get(word, "number")


def read_value(reader: Reader) -> Parse[str]:
    """Read a value; return its text."""
    pieces: list[str] = []
    yield from copy_value(reader, pieces.append)
    return "".join(pieces)


def read_string(reader: Reader, limit: int = MAX_KEY) -> Parse[str]:
    """Read a string; return its value. Raise Malformed past `limit` characters."""
    pieces: list[str] = []
    yield from copy_string(reader, pieces.append)
    text = "".join(pieces)
    if len(text) > limit:
        raise Malformed(f"a key or a name of more than {limit} characters")
    said: str = json.loads(text)
    return said


def copy_string(reader: Reader, emit: Emit) -> Parse[None]:
    """Read a string and pass its text on with its quotes."""
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


def _escape(reader: Reader) -> Parse[str]:
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


def _hex_digits(reader: Reader) -> Parse[str]:
    """Read the four digits of a \\u escape."""
    digits = ""
    while len(digits) < 4:
        digit = yield from reader.peek()
        if not _HEX.fullmatch(digit):
            raise Malformed("a \\u escape without four hexadecimal digits")
        digits += reader.take()
    return digits


def _copy_object(reader: Reader, emit: Emit, depth: int) -> Parse[None]:
    emit(reader.take())
    yield from reader.space()
    if (yield from reader.accept("}")):
        emit("}")
        return
    while True:
        yield from copy_string(reader, emit)
        yield from reader.space()
        yield from reader.expect(":")
        emit(": ")
        yield from reader.space()
        yield from copy_value(reader, emit, depth + 1)
        if (yield from _goes_on(reader, emit, "}")):
            return


def _copy_array(reader: Reader, emit: Emit, depth: int) -> Parse[None]:
    emit(reader.take())
    yield from reader.space()
    if (yield from reader.accept("]")):
        emit("]")
        return
    while True:
        yield from copy_value(reader, emit, depth + 1)
        if (yield from _goes_on(reader, emit, "]")):
            return


def _goes_on(reader: Reader, emit: Emit, end: str) -> Parse[bool]:
    """Read the comma or the end after an item; return whether it was the end."""
    yield from reader.space()
    mark = yield from reader.expect(",", end)
    emit(", " if mark == "," else end)
    if mark == end:
        return True
    yield from reader.space()
    return False
