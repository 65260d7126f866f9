"""One value, JSON (RFC 8259) or a Python literal, read from arriving text and passed on as JSON.

The output is passed on piece by piece. It is valid JSON where models are careless, too: line breaks
and other control characters within strings are escaped. Text that is no value raises Malformed, and
so does a Python expression that would have to be computed.
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
_PYTHON_WORD = re.compile(r"[-+.0-9A-Za-z_]+")
_PYTHON_NUMBER = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+"
    r"|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
)
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_LITERALS.update({value: value for value in ("true", "false", "null")})
_QUOTES = ('"""', "'''", '"', "'")
_UNQUOTED = {quote: re.compile(f"[^\\\\{quote}]+") for quote in "\"'"}
_ESCAPES = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True)) | {"\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_HEX_DIGIT = re.compile(r"[0-9A-Fa-f]")
_OCTAL = re.compile(r"[0-7]")


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


def python_to_json(text: str) -> str | None:
    """Return the JSON of a text that is one literal, None for any other text."""
    reader = Reader()
    reader.feed(text.strip())
    reader.close()
    pieces: list[str] = []
    try:
        for _ in copy_literal(reader, pieces.append):
            raise AssertionError("a closed reader waits for nothing")
        for _ in reader.expect_end():
            raise AssertionError("a closed reader waits for nothing")
    except Malformed:
        return None
    return "".join(pieces)


def copy_literal(reader: Reader, emit: Emit, depth: int = 0) -> Parse[None]:
    """Read a literal and pass it on as JSON."""
    if depth > MAX_DEPTH:
        raise Malformed(f"more than {MAX_DEPTH} lists and dicts within each other")
    first = yield from reader.peek()
    if first in ("[", "("):
        yield from _copy_list(reader, emit, depth)
    elif first == "{":
        yield from _copy_dict(reader, emit, depth)
    elif first in ("'", '"'):
        yield from _copy_python_string(reader, emit)
    else:
        emit((yield from _python_word(reader)))


def _python_word(reader: Reader) -> Parse[str]:
    """Read a number or a constant; return its JSON."""
    word = yield from reader.whole_run(_PYTHON_WORD)
    if word in _PYTHON_LITERALS:
        return _PYTHON_LITERALS[word]
    digits = word.replace("_", "")
    if not _PYTHON_NUMBER.fullmatch(digits):
        raise Malformed(f"{word!r} is no literal")
    if re.fullmatch(r"[-+]?[0-9]+", digits):
        return str(int(digits))
    if digits.lstrip("+-")[1:2].lower() in ("x", "o", "b"):
        return str(int(digits, 0))
    value = float(digits)
    if not math.isfinite(value):
        raise Malformed(f"{word} is too large for a number")
    return json.dumps(value)


def _copy_list(reader: Reader, emit: Emit, depth: int) -> Parse[None]:
    end = "]" if reader.take() == "[" else ")"
    emit("[")
    first = True
    while not (yield from _ended(reader, end)):
        emit("" if first else ", ")
        yield from copy_literal(reader, emit, depth + 1)
        yield from _after_item(reader, end)
        first = False
    emit("]")


def _copy_dict(reader: Reader, emit: Emit, depth: int) -> Parse[None]:
    reader.take()
    emit("{")
    first = True
    while not (yield from _ended(reader, "}")):
        emit("" if first else ", ")
        yield from _copy_key(reader, emit)
        yield from reader.space()
        yield from reader.expect(":")
        emit(": ")
        yield from reader.space()
        yield from copy_literal(reader, emit, depth + 1)
        yield from _after_item(reader, "}")
        first = False
    emit("}")


def _copy_key(reader: Reader, emit: Emit) -> Parse[None]:
    if (yield from reader.peek()) in ("'", '"'):
        yield from _copy_python_string(reader, emit)
    else:
        word = yield from _python_word(reader)
        emit(f'"{word}"')


def _ended(reader: Reader, end: str) -> Parse[bool]:
    yield from reader.space()
    return (yield from reader.accept(end)) is not None


def _after_item(reader: Reader, end: str) -> Parse[None]:
    """Read the comma after an item, unless the end follows."""
    yield from reader.space()
    if (yield from reader.peek()) != end:
        yield from reader.expect(",")


def _copy_python_string(reader: Reader, emit: Emit) -> Parse[None]:
    quote = yield from reader.expect(*_QUOTES)
    if quote in ('"', "'") and (yield from reader.accept(quote)):
        emit('""')
        return
    emit('"')
    while True:
        piece = yield from reader.run(_UNQUOTED[quote[0]])
        if not piece:
            if not (yield from reader.more()):
                raise Malformed("the text ended within a string")
            if (yield from reader.accept(quote)):
                break
            piece = reader.take()
            if piece == "\\":
                piece = yield from _python_escape(reader)
        emit(json.dumps(piece, ensure_ascii=False)[1:-1])
    emit('"')


def _python_escape(reader: Reader) -> Parse[str]:
    """Read what follows a backslash; return the character, or both where Python keeps both."""
    if not (yield from reader.more()):
        raise Malformed("the text ended within a string")
    char = reader.take()
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char in _CODES:
        code = int((yield from _digits(reader, _HEX_DIGIT, _CODES[char])), 16)
        if char == "u" and 0xD800 <= code < 0xDC00:
            return (yield from _low_half(reader, code))
        return _character(code)
    if _OCTAL.match(char):
        return chr(int(char + (yield from _digits(reader, _OCTAL, 2, fewer=True)), 8))
    return "\\" + char


def _low_half(reader: Reader, high: int) -> Parse[str]:
    """Read the second \\u escape of a surrogate pair, as JSON spells characters past U+FFFF."""
    yield from reader.expect("\\u")
    low = int((yield from _digits(reader, _HEX_DIGIT, 4)), 16)
    if not 0xDC00 <= low < 0xE000:
        raise Malformed(f"\\u{high:04x}\\u{low:04x} is no character")
    return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))


def _digits(
    reader: Reader, kind: re.Pattern[str], count: int, *, fewer: bool = False
) -> Parse[str]:
    digits = ""
    while len(digits) < count:
        if not kind.fullmatch((yield from reader.peek())):
            if fewer:
                break
            raise Malformed("an escape without its digits")
        digits += reader.take()
    return digits


def _character(code: int) -> str:
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise Malformed(f"\\U{code:08x} is no character")
    return chr(code)
