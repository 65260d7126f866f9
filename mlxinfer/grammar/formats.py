"""response_format and its like -> a grammar's description. Knows the shapes of requests."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidRequestError, shown
from . import spec
from .spec import GrammarSpec

MAX_SHOWN = 50  # characters of a name that a client made up
SCHEMA_KEYS = frozenset(("name", "description", "schema", "strict"))


def response_format(value: Any, *, place: str = "response_format") -> GrammarSpec | None:
    """What a request's response_format asks for; None: any text.

    Args:
        value: {"type": ...} with "text", "json_object", "json_schema" (as chat completions have it,
            {"json_schema": {"schema": ...}}, or flat, as responses have it), "regex", "choice" or
            "grammar", whose description stands under that name: {"type": "regex", "regex": ...}.
        place: the field's name, for messages.

    Raises:
        InvalidRequestError: it is none of these, or its grammar cannot be compiled.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        _only(value, {"type"}, place)
        return None
    if kind == "json_object":
        _only(value, {"type"}, place)
        return spec.json_object(place=place)
    if kind == "json_schema":
        return _json_schema(value, place)
    if isinstance(kind, str) and kind in _PLAIN:
        _only(value, {"type", kind}, place)
        return _PLAIN[kind](value.get(kind), place=f"{place}.{kind}")
    raise InvalidRequestError(
        f'{place} is {shown(value)}; expected {{"type": ...}} with one of text, json_object, '
        f"json_schema, {', '.join(_PLAIN)}.",
        param=place,
    )


_PLAIN: dict[str, Callable[..., GrammarSpec]] = {
    "regex": spec.regex,
    "choice": spec.choice,
    "grammar": spec.lark,
}


def _json_schema(value: Mapping[str, Any], place: str) -> GrammarSpec:
    """The schema is enforced whether `strict` is true or not: what cannot be is refused."""
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
    return spec.json_schema(inner["schema"], place=f"{place}.schema")


def _only(value: Mapping[str, Any], known: set[str] | frozenset[str], place: str) -> None:
    unknown = sorted(str(key)[:MAX_SHOWN] for key in set(value) - known)
    if unknown:
        raise InvalidRequestError(
            f"{place} has {unknown[0]!r}, which is not supported here; expected "
            f"{', '.join(sorted(known))}.",
            param=f"{place}.{unknown[0]}",
        )
