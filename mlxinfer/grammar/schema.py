"""Which JSON schemas are accepted: limits of size, depth and references, and exact numbers.

The cost of compiling a schema is bounded by the checking process (`compiler.py`). These limits keep
the masks of an accepted schema cheap, which are filled while a step runs.
"""

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from ..errors import InvalidRequestError, shown

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
ENDS_OF_TYPES = ((1 << 63) - 1, (1 << 64) - 1)  # llguidance keeps to these


def check_schema(schema: Any, *, place: str) -> None:
    """Raise InvalidRequestError, with a JSON pointer, for a schema outside of the limits.

    Args:
        schema: a JSON schema as Python's json reads it.
        place: its place in the request.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise InvalidRequestError(
            f"{place} has to be a JSON schema, an object; it is {type(schema).__name__}.",
            param=place,
        )
    _check_size(schema, place)
    _check_values(schema, place)


def _check_values(schema: Any, place: str) -> None:
    for pointer, value, keyword in _walk(schema):
        problem = _problem(value, keyword) or _number_problem(value, keyword)
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
        raise InvalidRequestError(
            f"{place} has {size} bytes; at most {MAX_BYTES} are accepted.", param=place
        )


def at(place: str, pointer: str, problem: str) -> InvalidRequestError:
    """Return the error of a schema, at a JSON pointer (RFC 6901) within it."""
    shown = pointer if len(pointer) <= MAX_POINTER else pointer[:MAX_POINTER] + "…"
    where = f" at {shown}" if pointer else ""
    return InvalidRequestError(f"{place}{where}: {problem}", param=place)


def escaped(key: str) -> str:
    """Return a key as a step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _walk(schema: Any) -> Iterator[tuple[str, Any, str]]:
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
    """Return what is wrong with one value by itself."""
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
    reference = value.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        return f"$ref {reference[:200]!r} points to another document; put it into $defs."
    properties = value.get("properties")
    if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
        return f"{len(properties)} properties; at most {MAX_PROPERTIES} are accepted."
    return None


def _number_problem(value: Any, keyword: str) -> str | None:
    """Return what is wrong with a number that answers must equal or be bounded by."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if keyword not in LITERALS and not (keyword in BOUNDS and isinstance(value, int)):
        return None
    if keyword in ("minimum", "maximum") and value in ENDS_OF_TYPES:
        return None
    if _is_exact(value):
        return None
    return (
        f"{shown(value)} has more digits than are kept: integers up to 2**53 and decimals of 15 "
        "digits are. Give it as a string, or leave it out."
    )


def _is_exact(value: int | float) -> bool:
    """Whether llguidance reads and writes a number without changing it."""
    if isinstance(value, int):
        return abs(value) <= MAX_EXACT
    if not math.isfinite(value):
        return True  # no JSON; _check_size refuses it
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return int("".join(map(str, digits))) <= MAX_EXACT and abs(int(exponent)) <= MAX_POWER
