"""Builds grammars of tool calls in llguidance's dialect of Lark.

Source: docs/syntax.md of llguidance. A control token is written by its id, `<[128010]>`, and is
part of no string. `%json` takes a schema in place. A rule with `suffix` ends at the first place
where its suffix stands.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .schema import Tool, enum_values, standalone_schema

MAX_CALLS = 32  # in one answer: where calls are forced some models repeat one until max_tokens
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,  # what cannot be kept is an error
}
_COMPOSED = frozenset(("additionalProperties", "allOf", "anyOf", "oneOf", "$ref"))


class Lark:
    """Builds one grammar, a rule at a time.

    Args:
        special: {text: token id} of control tokens; such text within a literal becomes the token.
    """

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        self._special = dict(special or {})
        words = sorted(self._special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, words))})") if words else None
        self._rules: list[str] = []
        self._num_names = 0

    def is_token(self, mark: str) -> bool:
        return bool(self._split and self._split.match(mark))

    def name(self) -> str:
        """Return the name of a rule that is added later, for rules that refer to themselves."""
        self._num_names += 1
        return f"r{self._num_names}"

    def rule(self, body: str, options: str = "", name: str = "") -> str:
        name = name or self.name()
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return what matches exactly this text, with its control tokens as tokens."""
        pieces = self._split.split(text) if self._split else [text]
        terms = [
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece)
            for piece in pieces
            if piece
        ]
        return " ".join(terms) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": _STYLE})

    def parameters(self, tool: Tool) -> str:
        """Return what matches a tool's arguments; undeclared ones only if none is declared."""
        schema = dict(tool.parameters)
        declared = schema.get("properties")
        whole = isinstance(declared, Mapping) and all(name in declared for name in tool.required)
        if whole and _COMPOSED.isdisjoint(schema):
            schema["additionalProperties"] = False
        return self.json(schema)

    def free_text(self, end: str, pattern: str | None = None) -> str:
        """Return what matches a text without control tokens up to `end`, and `end`.

        Args:
            end: ends the text. Where it contains a control token, the text before that token may
                be anything.
            pattern: regular expression of the whole text; None: any.
        """
        body = "/" + re.sub(r"(?<!\\)/", r"\/", pattern or "(?s:.*)") + "/"
        token = self._split.search(end) if self._split else None
        if token is None:
            return self.rule(body, f"[suffix={json.dumps(end)}]")
        marks = end if pattern else end[token.start() :]
        return f"{self.rule(body)} {self.text(marks)}"

    def one_of(self, options: Sequence[str]) -> str:
        return self.rule(" | ".join(options) or '""')

    def repeated(self, item: str, separator: str, *, parallel: bool) -> str:
        """Return what matches an item, and up to MAX_CALLS of them if `parallel`."""
        if not parallel:
            return item
        between = f"{self.text(separator)} " if separator else ""
        more = self.rule(f"{between}{item}")
        return self.rule(f"{item} {more}{{0,{MAX_CALLS - 1}}}")

    def arguments(self, tool: Tool, item: Callable[[str], str], separator: str = "") -> str:
        """Return what matches a tool's parameters: required ones first, each at most once.

        Args:
            item: makes what matches the parameter of a name.
        """
        required = [name for name in tool.properties if name in tool.required]
        optional = [name for name in tool.properties if name not in tool.required]
        between = f"{self.text(separator)} " if separator else ""
        items = {name: self.rule(item(name)) for name in tool.properties}
        starts: list[str] = []
        rest = ""  # what may follow: the optional ones from here on
        for name in reversed(optional):
            starts.append(f"{items[name]} {rest}")
            rest = self.rule(f"({between}{items[name]})? {rest}")
        if required:
            return f" {between}".join(items[name] for name in required) + f" {rest}"
        return f"({' | '.join(starts)})?" if starts else ""

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def value_rule(lark: Lark, tool: Tool, parameter: str, end: str) -> str:
    """Return what matches a value without quotes, and the mark after it.

    A string is free text, one of an `enum`, or what an anchored `pattern` matches; other values are
    JSON of their schema.
    """
    schema = tool.properties[parameter]
    fixed = strings_of(tool, parameter)
    if fixed:
        return f"{lark.one_of([lark.text(option) for option in fixed])} {lark.text(end)}"
    if "string" in tool.types_of(parameter) or not tool.types_of(parameter):
        body = _anchored_body(schema.get("pattern") if isinstance(schema, Mapping) else None)
        return lark.free_text(end) if body is None else lark.free_text(end, body)
    return f"{lark.json(standalone_schema(schema, tool.parameters))} {lark.text(end)}"


def _anchored_body(pattern: object) -> str | None:
    """Return what stands between the anchors of `^...$`, None for other patterns."""
    match = re.fullmatch(r"\^(.*[^\\])\$", pattern, re.DOTALL) if isinstance(pattern, str) else None
    if match is None:
        return None
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", match[1], flags=re.DOTALL)
    depth = 0
    for char in outside:
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:  # the anchors hold for one alternative each
            return None
    return match[1]


def strings_of(tool: Tool, parameter: str) -> list[str]:
    """Return the values of an `enum` or `const`, [] unless all of them are strings."""
    options = enum_values(tool.properties[parameter], tool.parameters)
    strings = [option for option in options if isinstance(option, str)]
    return strings if len(strings) == len(options) else []
