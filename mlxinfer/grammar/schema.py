"""Checks JSON schemas of answers, and rewrites them in the keywords of llguidance.

Limits hold for size, depth and references, and numbers have to be exact. The cost of compiling a
schema is bounded by the checking process (`compiler.py`). These limits keep the masks of an
accepted schema cheap, which are filled while a step runs.

Every rewrite accepts the same values (JSON Schema 2020-12), except `format`, which is an
annotation unless llguidance knows it. What has no equivalent is left as it is, and refused when
compiled.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from ..errors import InvalidRequestError, clipped, shown

MAX_BYTES = 1 << 20
MAX_DEPTH = 100  # levels of JSON
MAX_STRING = 4096  # characters of a name, a pattern or a literal: each becomes a chain of states
MAX_PROPERTIES = 1000  # of one object
MAX_POINTER = 200  # characters that a message shows
NOTES = frozenset(("title", "description", "$comment", "default", "examples", "deprecated"))
LITERALS = frozenset(("const", "enum"))
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
# llguidance keeps numbers as floats, and rounds them wrongly where they have more digits than this
# or a larger power of ten: they come out as other numbers.
MAX_EXACT = 1 << 53
MAX_POWER = 22
# Largest values of 64 bits, also as JavaScript rounds them: integers stay below 2**63 then.
ENDS_OF_TYPES = ((1 << 63) - 1, (1 << 64) - 1, 9223372036854776000, 18446744073709552000)
Schema = dict[str, Any]
FORMATS = frozenset(  # llguidance's; it refuses others
    (
        "date-time", "time", "date", "duration", "email", "hostname",
        "ipv4", "ipv6", "uri", "uuid",
    )
)  # fmt: skip
_ONE = frozenset(("additionalProperties", "items", "additionalItems"))  # keywords of parts
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_COMPOSED = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "$dynamicRef"))


def check_schema(schema: Any, *, place: str, strict: bool = False) -> None:
    """Raise InvalidRequestError, with a JSON pointer, for a schema outside of the limits.

    Args:
        strict: bounds have to be exact, too; else answers are checked against them.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequestError.of(
            place, f"has to be a JSON schema, an object; it is {type(schema).__name__}."
        )
    _check_size(schema, place)
    _check_values(schema, place, strict=strict)


def _check_values(schema: Any, place: str, *, strict: bool = False) -> None:
    for pointer, value, keyword in walk(schema):
        problem = _problem(value, keyword)
        is_bound = strict and keyword in BOUNDS
        if not (is_kept_bound if is_bound else is_kept)(value) and (
            is_bound or keyword in LITERALS
        ):
            problem = problem or _digits_problem(value)
        if problem:
            raise at(place, pointer, problem)


def _check_size(schema: Any, place: str) -> None:
    try:
        size = len(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except RecursionError:
        return  # the walk says where it is too deep
    except (TypeError, ValueError) as error:
        _check_values(schema, place)  # it may know where
        raise InvalidRequestError(f"{place} is not JSON: {error}.", param=place) from None
    if size > MAX_BYTES:
        raise InvalidRequestError.of(place, f"has {size} bytes; at most {MAX_BYTES} are accepted.")


def at(place: str, pointer: str, problem: str) -> InvalidRequestError:
    """Return the error of a schema, at a JSON pointer (RFC 6901) within it."""
    where = f" at {clipped(pointer, MAX_POINTER)}" if pointer else ""
    return InvalidRequestError(f"{place}{where}: {problem}", param=place)


def escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def walk(schema: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (pointer, value, keyword) of all values that count, without recursion.

    Notes are left out. Inside a literal or a note the keyword is that of the literal or note, else
    the value's own.
    """
    stack: list[tuple[str, Any, int, str]] = [("", schema, 0, "")]
    while stack:
        pointer, value, depth, keyword = stack.pop()
        yield pointer, (value if depth <= MAX_DEPTH else TooDeep()), keyword
        if depth > MAX_DEPTH:
            return
        literal = keyword in LITERALS or keyword in NOTES
        for key, inner in _children(value):
            is_note = key in NOTES and not literal and keyword not in MAPS  # there it is a name
            if is_note and not isinstance(inner, (Mapping, list, tuple)):
                continue
            step = f"{pointer}/{escaped(key)}"
            inside = "" if keyword in MAPS else key  # there a key is a name, and no keyword
            stack.append((step, inner, depth + 1, keyword if literal else inside))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), inner) for index, inner in enumerate(value))


class TooDeep:
    """Stands for the values below MAX_DEPTH."""


def _problem(value: Any, keyword: str) -> str | None:
    if isinstance(value, TooDeep):
        return f"the schema is nested more than {MAX_DEPTH} levels deep."
    if keyword in NOTES:
        return None
    if isinstance(value, str) and len(value) > MAX_STRING:
        return f"a string of {len(value)} characters; at most {MAX_STRING} are accepted."
    if not isinstance(value, Mapping):
        return None
    longest = max(map(len, map(str, value)), default=0)
    if longest > MAX_STRING:
        return f"a name of {longest} characters; at most {MAX_STRING} are accepted."
    if keyword in LITERALS or keyword in MAPS:
        return None  # no schema: its keys are anything
    if "x-guidance" in value:
        return "'x-guidance' is not supported; the options of a grammar are the server's."
    properties = value.get("properties")
    if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
        return f"{len(properties)} properties; at most {MAX_PROPERTIES} are accepted."
    return None


def _digits_problem(value: object) -> str:
    return (
        f"{shown(value)} has more digits than are kept: integers up to 2**53 and decimals of 15 "
        "digits are. Give it as a string, or leave it out."
    )


def is_kept(value: object) -> bool:
    """Whether llguidance writes a value without changing it, if it is a number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return not is_number or _is_exact(value)  # type: ignore[arg-type]


def is_kept_bound(value: object) -> bool:
    return not isinstance(value, int) or value in ENDS_OF_TYPES or is_kept(value)


def _is_exact(value: int | float) -> bool:
    if isinstance(value, int):
        return abs(value) <= MAX_EXACT
    if not math.isfinite(value):
        return True  # no JSON; _check_size refuses it
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return int("".join(map(str, digits))) <= MAX_EXACT and abs(int(exponent)) <= MAX_POWER


def mapped(schema: Any, change: Callable[[Schema], None]) -> Any:
    """Return a copy of a schema with all of its parts changed, the outermost first.

    Parts of keywords that hold no positive schema, such as `not`, stay as they are.
    """
    if not isinstance(schema, Mapping):
        return schema
    new = dict(schema)
    change(new)
    for key, value in new.items():
        if key in _LISTS and isinstance(value, list):
            new[key] = [mapped(item, change) for item in value]
        elif key in _ONE:
            new[key] = mapped(value, change)
        elif key in MAPS and isinstance(value, Mapping):
            new[key] = {name: mapped(item, change) for name, item in value.items()}
    return new


def rewrite(schema: Schema) -> None:
    for rule in _REWRITES:
        rule(schema)


def readable(value: Any, keyword: str = "") -> Any:
    """Return a schema with patterns and pointers that llguidance and the check read alike.

    Patterns of other languages are spelled as JavaScript and Rust do, with the same meaning.
    Pointers become URIs (RFC 3986): signs that have no place in one are percent-encoded.
    """
    if keyword in LITERALS or keyword in NOTES:
        return value
    if isinstance(value, (list, tuple)):
        return [readable(item) for item in value]
    if not isinstance(value, Mapping):
        change = _SPELLING.get(keyword) if isinstance(value, str) else None
        return value if change is None else change(value)
    if keyword == "patternProperties":
        return {_readable_pattern(str(name)): readable(item) for name, item in value.items()}
    names = keyword in MAPS
    return {key: readable(item, "" if names else key) for key, item in value.items()}


CLASS = r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]"  # of characters
_IN_CLASS = re.compile(r"(\\.|\[:\^?\w+:\])|\[", re.DOTALL)
_LITERAL = re.compile(  # escapes and classes, which stay; braces and brackets that mean themselves
    rf"(\\[pPux]\{{[^}}]*\}}|\\.|{CLASS}|\[.*)|\{{(?!\d+(?:,\d*)?\}})|\]", re.DOTALL
)
_PAIRS = re.compile(r"\\ud800\\ud(?:c00|bff)-\\ud(?:bff|c00)\\udfff", re.I)  # of surrogates: all


def _readable_pattern(pattern: str) -> str:
    """Escape signs that mean themselves, and write Python's end and Java's surrogates plainly."""
    pattern = _PAIRS.sub(r"\\u{10000}-\\u{10FFFF}", pattern)
    return _LITERAL.sub(_spelled, pattern)


def _pointer(reference: str) -> str:
    return quote(reference, safe=_OF_URIS) if reference.startswith("#") else reference


_OF_URIS = "!#$%&'()*+,/:;=?@[]~"  # beside letters, digits and -._
_SPELLING = {"pattern": _readable_pattern, "$ref": _pointer}


def _spelled(match: re.Match[str]) -> str:
    if match[0] == r"\Z":
        return r"\z"
    if match[0].startswith("[") and len(match[0]) > 1:  # Rust's classes hold others, JSON's do not
        return "[" + _IN_CLASS.sub(lambda inner: inner[1] or r"\[", match[0][1:])
    return match[1] or f"\\{match[0]}"


def _format(schema: Schema) -> None:
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)


def _without_effect(schema: Schema) -> None:
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
        schema.pop("uniqueItems", None)
    for key in ("propertyNames", "unevaluatedProperties", "unevaluatedItems"):
        if schema.get(key) in (True, {}) and schema[key] is not False:
            del schema[key]
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]


def _unevaluated(schema: Schema) -> None:
    if "unevaluatedProperties" not in schema or not _COMPOSED.isdisjoint(schema):
        return
    value = schema.pop("unevaluatedProperties")
    schema.setdefault("additionalProperties", value)


def _names(schema: Schema) -> None:
    """propertyNames with a list or a pattern of names, where no property is declared."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or not {"properties", "patternProperties"}.isdisjoint(schema):
        return
    rest = set(names) - {"type", "description", "title"}
    values = schema.get("additionalProperties", True)
    if rest == {"enum"} and isinstance(names["enum"], list):
        schema["properties"] = {name: values for name in names["enum"] if isinstance(name, str)}
    elif rest == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: values}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _dependencies(schema: Schema) -> None:
    demands: list[tuple[str, Any]] = []
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        given = schema.get(key)
        if not isinstance(given, Mapping):
            continue
        del schema[key]
        for name, demand in given.items():
            demands.append((name, {"required": demand} if isinstance(demand, list) else demand))
    for name, demand in demands:
        absent = {"properties": {name: False}}
        present = {"allOf": [{"required": [name]}, demand]}
        _add(schema, {"anyOf": [absent, present]})


def _negation(schema: Schema) -> None:
    """`not` of nothing, of all, of a required name, of what `enum` or `type` beside it lists."""
    inner = schema.get("not")
    if inner is False:
        del schema["not"]
    if inner is True or inner == {}:
        del schema["not"]
        schema["enum"] = []
    if not isinstance(inner, Mapping):
        return
    keys = set(inner)
    if keys in ({"enum"}, {"const"}) and isinstance(schema.get("enum"), list):
        excluded = inner["enum"] if "enum" in inner else [inner["const"]]
        if isinstance(excluded, list):
            schema["enum"] = [value for value in schema["enum"] if not _among(value, excluded)]
            del schema["not"]
    elif keys == {"type"} and isinstance(schema.get("type"), list):
        excluded = inner["type"] if isinstance(inner["type"], list) else [inner["type"]]
        if "number" not in excluded or "integer" not in schema["type"]:
            schema["type"] = [kind for kind in schema["type"] if kind not in excluded]
            del schema["not"]
    elif keys == {"required"} and schema.get("type") == "object":
        names = inner["required"]
        if isinstance(names, list) and names:
            absent = [{"properties": {name: False}} for name in names]
            del schema["not"]
            _add(schema, {"anyOf": absent})


def _condition(schema: Schema) -> None:
    tested = schema.get("if")
    if not isinstance(tested, Mapping) or not set(tested) <= {"properties", "required", "type"}:
        return
    wanted, declared = tested.get("properties"), schema.get("properties")
    if not isinstance(wanted, Mapping) or len(wanted) != 1 or not isinstance(declared, Mapping):
        return
    ((name, test),) = wanted.items()
    values = declared[name].get("enum") if isinstance(declared.get(name), Mapping) else None
    if not isinstance(test, Mapping) or set(test) - {"type"} not in ({"const"}, {"enum"}):
        return
    chosen = test["enum"] if "enum" in test else [test["const"]]
    required = tested.get("required", [])
    if not isinstance(values, list) or not isinstance(chosen, list) or required not in ([], [name]):
        return
    if tested.get("type", "object") != "object" or schema.get("type") != "object":
        return
    others = [value for value in values if not _among(value, chosen)]
    holds: list[Schema] = [{"properties": {name: {"enum": chosen}}, "required": [name]}]
    fails: list[Schema] = [{"properties": {name: {"enum": others}}, "required": [name]}]
    (fails if required else holds).append({"properties": {name: False}})
    then, other = schema.pop("then", True), schema.pop("else", True)
    del schema["if"]
    options = [{"allOf": [case, then]} for case in holds]
    options += [{"allOf": [case, other]} for case in fails]
    _add(schema, {"anyOf": options})


def _among(value: Any, values: list[Any]) -> bool:
    """Whether JSON values are equal: 1 is 1.0, and no bool."""
    return any(
        value == known and isinstance(value, bool) is isinstance(known, bool) for known in values
    )


def _add(schema: Schema, other: Schema) -> None:
    if "anyOf" in other and "anyOf" not in schema:
        schema["anyOf"] = other["anyOf"]
    else:
        schema["allOf"] = [*schema.get("allOf", []), other]


_REWRITES: tuple[Callable[[Schema], None], ...] = (
    _format,
    _without_effect,
    _unevaluated,
    _names,
    _dependencies,
    _negation,
    _condition,
)
