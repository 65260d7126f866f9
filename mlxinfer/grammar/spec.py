"""The grammar of an answer as one hashable description, and response_format as its source.

The texts are llguidance's: a JSON schema with the options of JSON_STYLE, or a grammar in its
variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Nothing is
compiled here.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidRequestError, wrong_value
from .references import resolved
from .relaxed import Unenforced, any_of, relaxed, require_checkable
from .schema import MAX_STRING, check_schema, mapped, readable, rewrite

MAX_REGEX = 4096  # characters
MAX_LARK = 65_536
MAX_GBNF = 16_384  # its translation takes a time that grows by the square
MAX_CHOICES = 10_000
# Between two tokens of JSON: a space, or a new line with its indentation. Any whitespace at all
# would let a model that has lost its thread write spaces for ever.
JSON_STYLE = {"whitespace_pattern": r" |\n[ \t]{0,32}", "lenient": False}
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
OPTIONS_KEY = "x-guidance"  # where a schema's options stand


MAX_SHOWN = 50  # characters of a name that a client made up
MAX_OPTION = 200  # characters
OPTIONS: dict[str, type] = {  # of `x-guidance`
    "whitespace_flexible": bool,
    "whitespace_pattern": str,
    "item_separator": str,
    "key_separator": str,
    "coerce_one_of": bool,
}
SCHEMA_KEYS = frozenset(("name", "description", "schema", "strict"))


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A JSON schema within a grammar, and its place in the request."""

    place: str  # such as tools[2].function.parameters
    text: str  # JSON, with its options


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One grammar; equal specs are compiled once."""

    place: str  # of the request's field, for messages
    main: str  # JSON: {"json_schema": ...} or {"lark_grammar": ...}
    schemas: tuple[SchemaPart, ...] = ()  # those inside `main`
    before: str = ""  # Lark that leads to @main; empty: nothing comes before
    is_free: bool = False  # Lark from a request, which may be ambiguous
    unenforced: tuple[Unenforced, ...] = ()  # schemas that complete answers are checked against

    @property
    def names_tokens(self) -> bool:
        """Whether the grammar may name control tokens; schemas alone do not."""
        return bool(self.before) or '"lark_grammar"' in self.main[:20]

    @property
    def source(self) -> str:
        main = '{"name": "main", ' + self.main.removeprefix("{")
        lead = [json.dumps({"lark_grammar": self.before})] if self.before else []
        return '{"grammars": [' + ", ".join([*lead, main]) + "]}"


def json_schema(
    schema: Any, *, place: str = "json_schema.schema", strict: bool = False
) -> GrammarSpec:
    """Return the grammar of answers that are one JSON value of a schema.

    Args:
        schema: JSON schema; `x-guidance` at its root may set llguidance's options of spacing.
        strict: refuse keywords that cannot be enforced, and a oneOf of options not seen to
            exclude each other. Otherwise complete answers are checked for these.

    Raises:
        InvalidRequestError: it is no schema, too large, too deep, or refers to other documents.
    """
    options: dict[str, Any] = dict(JSON_STYLE)
    if isinstance(schema, Mapping) and OPTIONS_KEY in schema:
        options |= _checked_options(schema[OPTIONS_KEY], place)
        schema = {key: value for key, value in schema.items() if key != OPTIONS_KEY}
    schema_part(schema, place=place)  # checks it
    whole = {} if schema is True else schema
    unenforced: tuple[Unenforced, ...] = ()
    if strict or options.get("coerce_one_of") is False:
        enforced = strictly(whole, place=place)
    else:
        asked = options.get("coerce_one_of") is True
        enforced, unenforced = enforceable(any_of(whole) if asked else whole, place=place)
    part = SchemaPart(place, json.dumps({OPTIONS_KEY: options, **enforced}, ensure_ascii=False))
    main = '{"json_schema": ' + part.text + "}"
    return GrammarSpec(place, main, (part,), unenforced=unenforced)


def enforceable(
    schema: Mapping[str, Any], *, place: str, tool: str | None = None
) -> tuple[Mapping[str, Any], tuple[Unenforced, ...]]:
    """Return the part of a checked schema that masks can enforce, and the rest for a check.

    Args:
        tool: the schema is of its parameters; None: it is of no tool.

    Raises:
        InvalidRequestError: it refers to other documents, or is no JSON schema.
    """
    schema = readable(schema)
    plain, loose = resolved(schema, place)
    enforced, dropped = relaxed(plain)
    keywords = tuple(sorted({*loose, *dropped}))
    if not keywords:
        return enforced, ()
    part = Unenforced(tool, place, json.dumps(schema, ensure_ascii=False), keywords)
    require_checkable(part)
    return enforced, (part,)


def strictly(schema: Mapping[str, Any], *, place: str) -> Mapping[str, Any]:
    """Return an equivalent of a checked schema in llguidance's keywords.

    Raises:
        InvalidRequestError: there is none.
    """
    check_schema(schema, place=place, strict=True)
    plain, loose = resolved(readable(schema), place)
    if loose:
        raise InvalidRequestError(f"{place}: {loose[0]} cannot be enforced.", param=place)
    new: Mapping[str, Any] = mapped(plain, rewrite)
    return new


def json_object(*, place: str = "response_format") -> GrammarSpec:
    return json_schema({"type": "object"}, place=place)


def regex(pattern: Any, *, place: str = "regex") -> GrammarSpec:
    _check_text(pattern, MAX_REGEX, place)
    import llguidance  # the first use of a grammar pays for it, not the start

    return _lark(f"start: /{llguidance.regex_to_lark(pattern)}/", place)


def choice(choices: Any, *, place: str = "choice") -> GrammarSpec:
    if not isinstance(choices, (list, tuple)) or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequestError.of(place, f"has to be a list of 1 to {MAX_CHOICES} strings.")
    for number, text in enumerate(choices):
        _check_text(text, MAX_STRING, f"{place}[{number}]")
    # one terminal: as many alternatives of a rule are as many items of the parser
    return _lark("start: ONE\nONE: " + " | ".join(map(quoted, dict.fromkeys(choices))), place)


def lark(grammar: Any, *, place: str = "grammar") -> GrammarSpec:
    """Return the grammar of answers that a Lark grammar derives from its rule `start`.

    A grammar of llama.cpp (GBNF), with rules `name ::= …` and `root`, is translated.

    Raises:
        InvalidRequestError: it is too long, no text, or cannot be translated.
    """
    _check_text(grammar, MAX_LARK, place)
    if _GBNF.search(grammar):
        _check_text(grammar, MAX_GBNF, place)
        grammar = _translated(grammar, place)
    return replace(_lark(grammar, place), is_free=True)


def _translated(grammar: str, place: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # it raises Exception itself
        raise InvalidRequestError(
            f"{place} is in GBNF and cannot be translated: {error}", param=place
        ) from None


def tool_calls(
    grammar: str, schemas: Iterable[tuple[str, Any]], unenforced: tuple[Unenforced, ...] = ()
) -> GrammarSpec:
    """Return the grammar of answers that call tools.

    Args:
        grammar: Lark with the schemas of the tools, as `text.tools` writes it.
        schemas: (place in the request, schema) of each of these tools.

    Raises:
        InvalidRequestError: those of json_schema.
    """
    parts = [schema_part(schema, place=place) for place, schema in schemas]
    return replace(_lark(grammar, "tools", parts), unenforced=unenforced)


def schema_part(schema: Any, *, place: str) -> SchemaPart:
    """Return a checked schema with JSON_STYLE. Raises InvalidRequestError: those of json_schema."""
    check_schema(schema, place=place)
    if schema is False:
        raise InvalidRequestError(f"{place} is false, which nothing satisfies.", param=place)
    full = {OPTIONS_KEY: JSON_STYLE, **({} if schema is True else schema)}
    return SchemaPart(place, json.dumps(full, ensure_ascii=False))


def _checked_options(value: Any, place: str) -> dict[str, Any]:
    """Return options of llguidance that a request may set; raise InvalidRequestError for others."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{place}.{OPTIONS_KEY} is no object.", param=place)
    for key, option in value.items():
        kind = OPTIONS.get(str(key))
        if kind is None:
            raise InvalidRequestError(
                f"{place}.{OPTIONS_KEY}.{str(key)[:MAX_SHOWN]} is not supported; expected "
                f"{', '.join(OPTIONS)}.",
                param=place,
            )
        if not isinstance(option, kind) or (isinstance(option, str) and len(option) > MAX_OPTION):
            raise wrong_value(f"{place}.{OPTIONS_KEY}.{key}", option, kind.__name__, place)
    flexible = value.get("whitespace_flexible")
    spacing = {} if flexible is None else {"whitespace_pattern": None}
    return {**spacing, **value}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lark(grammar: str, place: str, schemas: Sequence[SchemaPart] = ()) -> GrammarSpec:
    return GrammarSpec(place, json.dumps({"lark_grammar": grammar}), tuple(schemas))


def _check_text(text: object, max_chars: int, place: str) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{place} has to be a text that is not empty.", param=place)
    if len(text) > max_chars:
        raise InvalidRequestError(
            f"{place} has {len(text)} characters; at most {max_chars} are accepted.", param=place
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{place} holds half of a surrogate pair; send valid Unicode.", param=place
        ) from None


def response_format(value: Any, *, place: str = "response_format") -> GrammarSpec | None:
    """Return the grammar that a request's response_format asks for; None: any text.

    Args:
        value: {"type": ...} with "text", "json_object" (which may have a schema), "json_schema"
            (as chat completions have it,
            {"json_schema": {"schema": ...}}, or flat, as responses have it), "regex", "choice" or
            "grammar", with the grammar under that name: {"type": "regex", "regex": ...}.

    Raises:
        InvalidRequestError: it is none of these, or its grammar is invalid.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        _only(value, {"type"}, place)
        return None
    if kind == "json_object":
        _only(value, {"type", "schema"}, place)
        if value.get("schema") is not None:  # as llama.cpp and others write it
            return json_schema(value["schema"], place=f"{place}.schema")
        return json_object(place=place)
    if kind == "json_schema":
        return _json_schema(value, place)
    if isinstance(kind, str) and kind in _PLAIN:
        _only(value, {"type", kind}, place)
        return _PLAIN[kind](value.get(kind), place=f"{place}.{kind}")
    kinds = ("text", "json_object", "json_schema", *_PLAIN)
    raise wrong_value(place, value, f'{{"type": ...}} with one of {", ".join(kinds)}')


_PLAIN: dict[str, Callable[..., GrammarSpec]] = {"regex": regex, "choice": choice, "grammar": lark}


def _json_schema(value: Mapping[str, Any], place: str) -> GrammarSpec:
    """Return the schema's grammar; it is enforced whether `strict` is true or not."""
    inner = value
    if "json_schema" in value:
        _only(value, {"type", "json_schema"}, place)
        place, inner = f"{place}.json_schema", value["json_schema"]
        if not isinstance(inner, Mapping):
            raise InvalidRequestError(f"{place} has to be an object.", param=place)
    _only(inner, {*SCHEMA_KEYS, "type"} if inner is value else SCHEMA_KEYS, place)
    if inner.get("strict") not in (None, True, False):
        raise InvalidRequestError(f"{place}.strict has to be true or false.", param=place)
    if inner.get("schema") is None:
        raise InvalidRequestError(
            f"{place}.schema is missing; expected "
            '{"type": "json_schema", "json_schema": {"schema": ...}}.',
            param=f"{place}.schema",
        )
    strict = inner.get("strict") is True
    return json_schema(inner["schema"], place=f"{place}.schema", strict=strict)


def _only(value: Mapping[str, Any], known: set[str] | frozenset[str], place: str) -> None:
    unknown = sorted(str(key)[:MAX_SHOWN] for key in set(value) - known)
    if unknown:
        raise InvalidRequestError(
            f"{place} has {unknown[0]!r}, which is not supported here; expected "
            f"{', '.join(sorted(known))}.",
            param=f"{place}.{unknown[0]}",
        )
