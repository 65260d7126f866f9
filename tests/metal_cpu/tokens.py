"""C++ text as tokens that know what is code. Knows no grammar.

Joining the texts of all tokens gives the text back: comments, strings, preprocessor lines and
space are tokens too, so that whatever works on code tokens never touches those.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache


class Kind(Enum):
    """What a token is."""

    SPACE = auto()  # and comments, and preprocessor lines
    TEXT = auto()  # strings and characters
    NUMBER = auto()
    NAME = auto()
    MARK = auto()  # punctuation, one character each


@dataclass(frozen=True, slots=True)
class Token:
    """One token."""

    kind: Kind
    text: str
    line: int

    @property
    def is_code(self) -> bool:
        """Whether a compiler sees it."""
        return self.kind is not Kind.SPACE


_PATTERN = re.compile(
    r"""(?P<SPACE>\s+|//[^\n]*|/\*.*?\*/|\#(?:\\\n|/\*.*?\*/|[^\n/]|/(?!\*))*)
      |(?P<TEXT>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      |(?P<NUMBER>\.?\d(?:[eEpP][+-]|[\w.'])*)
      |(?P<NAME>[A-Za-z_]\w*)
      |(?P<MARK>.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def tokens(text: str) -> Iterator[Token]:
    """Every token of a text, in order."""
    line = 1
    for match in _PATTERN.finditer(text):
        piece = match[0]
        yield Token(Kind[match.lastgroup or ""], piece, line)
        line += piece.count("\n")


@lru_cache(maxsize=128)
def code_of(text: str) -> tuple[Token, ...]:
    """The tokens that a compiler sees; kept, since most kernels share most of their files."""
    return tuple(token for token in tokens(text) if token.is_code)


def joined(pieces: Sequence[Token]) -> str:
    """The text of tokens."""
    return "".join(piece.text for piece in pieces)


OPENING = {"(": ")", "[": "]", "{": "}", "<": ">"}


def closing(pieces: Sequence[Token], start: int) -> int:
    """Index of the mark that closes the one at `start`; angle ones only in one statement.

    Raises:
        ValueError: nothing closes it.
    """
    ours, depth = pieces[start].text, 0
    index = start
    while index < len(pieces):
        text = pieces[index].text if pieces[index].kind is Kind.MARK else ""
        if text == ours:
            depth += 1
        elif text == OPENING[ours]:
            depth -= 1
            if depth == 0:
                return index
        elif ours == "<" and text in ("(", "["):
            index = closing(pieces, index)
        elif ours == "<" and text in (";", "{", "}"):
            break
        index += 1
    raise ValueError(f"line {pieces[start].line}: nothing closes {ours!r}")


def after(pieces: Sequence[Token], index: int) -> int:
    """Index of the first code token after `index`; the number of tokens: there is none."""
    return next((i for i in range(index + 1, len(pieces)) if pieces[i].is_code), len(pieces))


def before(pieces: Sequence[Token], index: int) -> int:
    """Index of the last code token before `index`; -1: there is none."""
    return next((i for i in range(index - 1, -1, -1) if pieces[i].is_code), -1)


def text_at(pieces: Sequence[Token], index: int) -> str:
    """The text of a token; empty outside."""
    return pieces[index].text if 0 <= index < len(pieces) else ""


def split(pieces: Sequence[Token]) -> list[list[Token]]:
    """Tokens between commas that are in no brackets, angle brackets included."""
    groups: list[list[Token]] = [[]]
    index = 0
    while index < len(pieces):
        text = pieces[index].text
        end = closing(pieces, index) if text in OPENING and pieces[index].is_code else index
        if text == "," and end == index:
            groups.append([])
        else:
            groups[-1] += pieces[index : end + 1]
        index = end + 1
    return groups
