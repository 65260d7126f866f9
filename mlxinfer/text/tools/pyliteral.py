"""One Python literal read from arriving text and passed on as JSON.

Strings, numbers, True, False and None (or JSON's spelling), lists, tuples and dicts. An expression
that would have to be computed raises Malformed. A dict's keys become strings.
"""

import json
import math
import re

from .jsontext import MAX_DEPTH, Emit
from .reader import Malformed, Parse, Reader

_WORD = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(
    r"[-+]?(?:0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+"
    r"|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_LITERALS.update({value: value for value in ("true", "false", "null")})
_QUOTES = ('"""', "'''", '"', "'")
_PLAIN = {quote: re.compile(f"[^\\\\{quote}]+") for quote in "\"'"}
_ESCAPES = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True)) | {"\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9A-Fa-f]")
_OCTAL = re.compile(r"[0-7]")


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
        yield from _copy_string(reader, emit)
    else:
        emit((yield from _word(reader)))


def _word(reader: Reader) -> Parse[str]:
    """Read a number or a constant; return its JSON."""
    word = yield from reader.whole_run(_WORD)
    if word in _LITERALS:
        return _LITERALS[word]
    digits = word.replace("_", "")
    if not _NUMBER.fullmatch(digits):
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
        yield from _copy_string(reader, emit)
    else:
        word = yield from _word(reader)
        emit(f'"{word}"')


def _ended(reader: Reader, end: str) -> Parse[bool]:
    yield from reader.space()
    return (yield from reader.accept(end)) is not None


def _after_item(reader: Reader, end: str) -> Parse[None]:
    """Read the comma after an item, unless the end follows."""
    yield from reader.space()
    if (yield from reader.peek()) != end:
        yield from reader.expect(",")


def _copy_string(reader: Reader, emit: Emit) -> Parse[None]:
    quote = yield from reader.expect(*_QUOTES)
    if quote in ('"', "'") and (yield from reader.accept(quote)):
        emit('""')
        return
    emit('"')
    while True:
        piece = yield from reader.run(_PLAIN[quote[0]])
        if not piece:
            if not (yield from reader.more()):
                raise Malformed("the text ended within a string")
            if (yield from reader.accept(quote)):
                break
            piece = reader.take()
            if piece == "\\":
                piece = yield from _escape(reader)
        emit(json.dumps(piece, ensure_ascii=False)[1:-1])
    emit('"')


def _escape(reader: Reader) -> Parse[str]:
    """Read what follows a backslash; return the character, or both where Python keeps both."""
    if not (yield from reader.more()):
        raise Malformed("the text ended within a string")
    char = reader.take()
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char in _CODES:
        code = int((yield from _digits(reader, _HEX, _CODES[char])), 16)
        if char == "u" and 0xD800 <= code < 0xDC00:
            return (yield from _low_half(reader, code))
        return _character(code)
    if _OCTAL.match(char):
        return chr(int(char + (yield from _digits(reader, _OCTAL, 2, fewer=True)), 8))
    return "\\" + char


def _low_half(reader: Reader, high: int) -> Parse[str]:
    """Read the second \\u escape of a surrogate pair, as JSON spells characters past U+FFFF."""
    yield from reader.expect("\\u")
    low = int((yield from _digits(reader, _HEX, 4)), 16)
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
