"""The form of an answer: fields of requests to a GrammarSpec."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import InvalidRequestError, UnsupportedFieldError
from ...grammar import GrammarSpec, response_format, spec
from .sampling import SamplingFields, check_json_size

_SCHEMA = Meta(description="JSON schema")  # /docs lists fields of any type only if described
_REGEX = Meta(description="regular expression")


class ConstraintFields(SamplingFields, kw_only=True):
    """OpenAI's response_format, and the constraint fields of vLLM, SGLang and llama.cpp."""

    response_format: Annotated[
        Any, Meta(description='{"type": "json_schema", "json_schema": {…}}, or json_object, text')
    ] = None
    structured_outputs: Annotated[
        Any, Meta(description="one of json, regex, choice, grammar, json_object")
    ] = None
    guided_json: Annotated[Any, _SCHEMA] = None
    guided_regex: Annotated[Any, _REGEX] = None
    guided_choice: Annotated[Any, Meta(description="list of string")] = None
    guided_grammar: Annotated[Any, Meta(description="grammar in Lark's form")] = None
    json_schema: Annotated[Any, _SCHEMA] = None
    regex: Annotated[Any, _REGEX] = None
    format: Annotated[Any, Meta(description="Ollama's: json, or a JSON schema")] = None
    grammar: Any = None
    ebnf: Any = None


def constraint(fields: ConstraintFields) -> GrammarSpec | None:
    """The constraint that a request names; None: any text.

    Raises:
        InvalidRequestError: it is invalid, or there are two.
        UnsupportedFieldError: a grammar in a language that is not supported.
    """
    for name in ("grammar", "ebnf"):
        if getattr(fields, name) not in (None, ""):
            raise UnsupportedFieldError(
                f"{name} is in GBNF or EBNF, which are not read here; send a Lark grammar as "
                "structured_outputs.grammar.",
                param=name,
            )
    given = {name: getattr(fields, name) for name in _READERS}
    found = {
        name: read_form(value, name, _READERS[name])
        for name, value in given.items()
        if value is not None
    }
    asked = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(asked) > 1:
        names = " and ".join(asked)
        raise InvalidRequestError(f"{names} exclude each other; send one.", param=names.split()[2])
    return next(iter(asked.values()), None)


def read_form(
    value: Any, place: str, read: Callable[..., GrammarSpec | None] = response_format
) -> GrammarSpec | None:
    """The constraint of one field, as a response_format unless told otherwise."""
    check_json_size(value, param=place)
    return read(value, place=place)


def _schema(value: Any, *, place: str) -> GrammarSpec:
    """A schema, as an object or as JSON in a string."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise InvalidRequestError(f"{place} is no JSON.", param=place) from None
    return spec.json_schema(value, place=place)


def ollama_format(value: Any, *, place: str) -> GrammarSpec | None:
    """Ollama's format: "json" or a schema; "" is none."""
    if value == "":
        return None
    return spec.json_object(place=place) if value == "json" else _schema(value, place=place)


def _structured(value: Any, *, place: str) -> GrammarSpec | None:
    """vLLM's structured_outputs: one of a few keys."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{place} is no object.", param=place)
    given = {key: inner for key, inner in value.items() if inner is not None and inner is not False}
    for key in given:
        if key not in _STRUCTURED and key != "json_object":
            raise UnsupportedFieldError(
                f"{place}.{str(key)[:50]} is not supported; there are json_object, "
                f"{', '.join(_STRUCTURED)}.",
                param=f"{place}.{str(key)[:50]}",
            )
    if len(given) != 1:
        raise InvalidRequestError(f"{place} holds {len(given)} constraints, not one.", param=place)
    ((key, inner),) = given.items()
    if key == "json_object":
        return spec.json_object(place=f"{place}.json_object")
    return _STRUCTURED[key](inner, place=f"{place}.{key}")


_STRUCTURED: dict[str, Callable[..., GrammarSpec]] = {
    "json": _schema,
    "regex": spec.regex,
    "choice": spec.choice,
    "grammar": spec.lark,
}
_READERS: dict[str, Callable[..., GrammarSpec | None]] = {
    "response_format": response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": spec.regex,
    "guided_choice": spec.choice,
    "guided_grammar": spec.lark,
    "json_schema": _schema,
    "regex": spec.regex,
    "format": ollama_format,
}
