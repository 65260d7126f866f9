"""The literal texts of a tool-call format: flexible in white space when read, exact when forced."""

import re
from collections.abc import Sequence

from ..reader import Parse, TextReader
from .lark import Lark

COUNT = "\0count\0"  # a number that counts calls, within a text
ID = "\0id\0"  # the id of a call, within a text
_WORD = re.compile(r"\0[a-z]+\0|<[^<>\s\0]*>?|\[[A-Z_/]+\]|[^\s<\[\0]+|\[")
_PATTERNS = {COUNT: re.compile("[0-9]+"), ID: re.compile("[A-Za-z0-9_.:-]+")}
_RULES = {COUNT: "/[0-9]{1,4}/", ID: "/[A-Za-z0-9_.:-]{1,64}/"}


def words_of(text: str) -> list[str]:
    """Return the marks of a text in order, without white space: tags, COUNT, and other runs."""
    return _WORD.findall(text)


def first_word(*texts: str) -> str:
    """Return the first mark of these texts joined, "" where all are blank."""
    return next(iter(words_of("".join(texts))), "")


def literals_of(text: str) -> list[str]:
    """Return the parts of a text between its numbers and ids, without white space around them."""
    return [part.strip() for part in re.split("\0[a-z]+\0", text) if part.strip()]


def pattern_of(words: Sequence[str]) -> str:
    return "".join(
        rf"\s*{_PATTERNS[word].pattern if word in _PATTERNS else re.escape(word)}" for word in words
    )


def expect_text(reader: TextReader, text: str) -> Parse[None]:
    """Read a text, with any white space; raise Malformed if anything else stands here."""
    yield from expect_words(reader, words_of(text))


def expect_words(reader: TextReader, words: Sequence[str]) -> Parse[None]:
    """Read marks in a row, with any white space; raise Malformed if anything else stands here."""
    for word in words:
        yield from reader.space()
        if word in _PATTERNS:
            yield from reader.whole_run(_PATTERNS[word])
        else:
            yield from reader.expect(word)


def skip_text(reader: TextReader, text: str) -> Parse[bool]:
    """Read the marks of a text until one is missing; return whether the first one does."""
    words = words_of(text)
    for number, word in enumerate(words):
        yield from reader.space()
        if not (yield from reader.accept(word)):
            return number > 0
    return bool(words)


def exact_text(lark: Lark, text: str) -> str:
    """Return what matches a text, with any number for COUNT and any id for ID."""
    pieces = [piece for piece in re.split("(\0[a-z]+\0)", text) if piece]
    terms = [lark.rule(_RULES[p]) if p in _RULES else lark.text(p) for p in pieces]
    return " ".join(terms) or lark.text("")
