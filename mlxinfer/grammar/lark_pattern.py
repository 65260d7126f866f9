"""Regular Lark grammars as one regular expression, which JSON strings can be constrained by.

Source: Lark's grammar reference (lark-parser.readthedocs.io/en/stable/grammar.html). A grammar is
regular here if no rule refers to itself. Its language is taken as without a lexer: where Lark would
take the longest terminal, the expression allows shorter ones too.
"""

import ast
import re
from collections.abc import Iterator

MAX_CHARS = 50_000  # of the expression: rules are written out wherever they are used
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[imslux]*)
    |(?P<directive>%[a-z]+)
    |(?P<name>[?!]*[A-Za-z_]\w*)
    |(?P<number>\d+)
    |(?P<sign>->|\.\.|[|()\[\]?*+~:{},.])""",
    re.VERBOSE,
)
_COMMON = {  # lark/grammars/common.lark
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"(?:[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}


class NotRegularError(Exception):
    """The grammar is no regular one, or uses what is not read here; the message says which."""


def lark_pattern(grammar: str) -> str:
    """A regular expression of the texts that a Lark grammar allows, without anchors.

    Raises:
        NotRegularError: a rule refers to itself, or the grammar cannot be read.
    """
    return _Grammar(grammar).pattern("start")


Token = tuple[str, str]  # kind, text


class _Grammar:
    """The rules of a grammar as lists of tokens, each turned into an expression once."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._rules: dict[str, list[Token]] = {}
        self._patterns: dict[str, str] = {}
        self._open: list[str] = []
        self._read_rules()

    def pattern(self, name: str) -> str:
        """The expression of a rule or terminal."""
        if name in self._patterns:
            return self._patterns[name]
        if name in self._open:
            raise NotRegularError(f"the rule {name[:50]} refers to itself")
        if name not in self._rules:
            raise NotRegularError(f"there is no rule {name[:50]}")
        self._open.append(name)
        rest = list(reversed(self._rules[name]))
        found = self._alternatives(rest)
        if rest:
            raise NotRegularError(f"{rest[-1][1][:20]!r} in the rule {name[:50]}")
        self._open.pop()
        if len(found) > MAX_CHARS:
            raise NotRegularError("it is too long when it is written out")
        self._patterns[name] = found
        return found

    def _read_rules(self) -> None:
        tokens, count = self._tokens, len(self._tokens)
        starts = [i for i in range(count) if tokens[i][0] == "directive" or self._defines(i)]
        if tokens and starts[:1] != [0]:
            raise NotRegularError(f"a definition was expected at {tokens[0][1][:20]!r}")
        for start, stop in zip(starts, [*starts[1:], count], strict=False):
            kind, text = tokens[start]
            if kind == "directive":
                self._import(text, [word for _, word in tokens[start + 1 : stop]])
            else:
                body = tokens.index(("sign", ":"), start) + 1
                self._rules[text.lstrip("?!")] = tokens[body:stop]

    def _defines(self, at: int) -> bool:
        """Whether a definition begins here: `name:` or `name.2:`."""
        if self._tokens[at][0] != "name":
            return False
        after = self._tokens[at + 1 : at + 4]
        if [kind for kind, _ in after[:2]] == ["sign", "number"] and after[0][1] == ".":
            after = after[2:]
        return after[:1] == [("sign", ":")]

    def _import(self, directive: str, words: list[str]) -> None:
        """`%import common.LF`, `%import common.LF -> END` or `%import common (LF, WS)`."""
        if directive != "%import" or words[:1] != ["common"]:
            raise NotRegularError(f"{directive} {' '.join(words)[:50]}")
        names = [word for word in words[1:] if word[0].isalpha()]
        if "->" in words:
            (name, alias) = names
            self._add_common(name, alias)
            return
        for name in names:
            self._add_common(name, name)

    def _add_common(self, name: str, alias: str) -> None:
        if name not in _COMMON:
            raise NotRegularError(f"common.{name[:50]}")
        self._patterns[alias] = _COMMON[name]

    def _alternatives(self, rest: list[Token]) -> str:
        """Read `a b | c -> name`; `rest` has the tokens in reverse."""
        options = [self._sequence(rest)]
        while rest and rest[-1] == ("sign", "|"):
            rest.pop()
            options.append(self._sequence(rest))
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self, rest: list[Token]) -> str:
        items: list[str] = []
        while rest and rest[-1] not in (("sign", "|"), ("sign", ")"), ("sign", "]")):
            if rest[-1] == ("sign", "->"):
                rest.pop()
                rest.pop()
                continue
            items.append(self._repeated(rest))
        return "".join(items)

    def _repeated(self, rest: list[Token]) -> str:
        item = self._item(rest)
        while rest and rest[-1][1] in ("?", "*", "+", "~"):
            sign = rest.pop()[1]
            if sign == "~":
                least = most = _number(rest)
                if rest and rest[-1] == ("sign", ".."):
                    rest.pop()
                    most = _number(rest)
                sign = f"{{{least},{most}}}"
            item = f"(?:{item}){sign}"
        return item

    def _item(self, rest: list[Token]) -> str:
        kind, text = rest.pop()
        if kind == "string":
            return _literal(text)
        if kind == "regex":
            return _expression(text)
        if kind == "name":
            return f"(?:{self.pattern(text.lstrip('?!'))})"
        if text in ("(", "["):
            inner = self._alternatives(rest)
            if not rest or rest.pop()[1] != {"(": ")", "[": "]"}[text]:
                raise NotRegularError(f"{text!r} is not closed")
            return f"(?:{inner})" + ("?" if text == "[" else "")
        raise NotRegularError(f"{text[:20]!r} was not expected")


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NotRegularError(f"{text[at : at + 20]!r} cannot be read")
        at = found.end()
        assert found.lastgroup is not None
        if found.lastgroup != "space":
            yield found.lastgroup, found.group()


def _number(rest: list[Token]) -> int:
    if not rest or rest[-1][0] != "number" or len(rest[-1][1]) > 9:
        raise NotRegularError("a number was expected after '~' or '..'")
    return int(rest.pop()[1])


def _literal(text: str) -> str:
    """An expression of a string in quotes."""
    body = text.removesuffix("i")
    try:
        plain = ast.literal_eval(body)
    except (SyntaxError, ValueError):
        raise NotRegularError(f"{text[:20]} cannot be read") from None
    escaped = re.sub(r"[^\w]", _escaped, plain)
    return f"(?i:{escaped})" if text.endswith("i") else escaped


def _escaped(found: re.Match[str]) -> str:
    char = found.group()
    if char.isascii() and char.isprintable() and char not in " \"<>&~#%,:;=@`!'-/":
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 0x20 else char


def _expression(text: str) -> str:
    """An expression of a regular expression in slashes, with its flags."""
    body, _, flags = text[1:].rpartition("/")
    if set(flags) - set("is"):
        raise NotRegularError(f"the flags {flags} of {text[:20]}")
    return f"(?{flags}:{body})"
