"""JSON schemas without what llguidance cannot enforce, and the check of answers for the rest.

A schema that is not strict is enforced as far as masks can do it. What they cannot do is left out
of the grammar, and the complete answer is checked against the whole schema.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..outputs import Result
from .schema import Schema, rewritten

UNENFORCED = (  # keywords that llguidance refuses, as far as `rewritten` has no equivalent
    *("uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems", "dependentSchemas"),
    *("dependentRequired", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_BEYOND_REGULAR = re.compile(r"\(\?(?:=|!|<=|<!)|\\[1-9]|\\k<")  # look-around, back-references
MAX_BACKTRACKS = 100_000  # of one pattern, in the check
MAX_PROBLEM = 300  # characters of a message


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A schema that its grammar enforces in part.

    Attributes:
        tool: whose calls it is of; None: of the text of the answer.
        place: in the request, for messages.
        schema: JSON text.
        keywords: that the grammar leaves out.
    """

    tool: str | None
    place: str
    schema: str
    keywords: tuple[str, ...]


def relaxed(schema: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the schema in llguidance's keywords, and the keywords that were left out of it.

    Where nothing was left out the schemas accept the same values, but that any option of a oneOf
    may match, not exactly one.
    """
    dropped: set[str] = set()
    return _without(rewritten(any_of(schema)), dropped), tuple(sorted(dropped))


def any_of(schema: Any) -> Any:
    """Return the schema with each oneOf as an anyOf."""
    return _mapped(schema, _one_of_as_any_of)


def _one_of_as_any_of(schema: Schema) -> None:
    options = schema.pop("oneOf", None)
    if options is None:
        return
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": options}]
    else:
        schema["anyOf"] = options


def _without(schema: Any, dropped: set[str]) -> Any:
    """The schema without what llguidance refuses; its keywords are added to `dropped`."""

    def drop(part: Schema) -> None:
        for key in UNENFORCED:
            if key in part:
                del part[key]
                dropped.add(key)
        pattern = part.get("pattern")
        if isinstance(pattern, str) and _BEYOND_REGULAR.search(pattern):
            del part["pattern"]
            dropped.add("pattern")

    return _mapped(schema, drop)


_ONE = frozenset(("additionalProperties", "items", "additionalItems"))
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))


def _mapped(schema: Any, change: Callable[[Schema], None]) -> Any:
    """A copy of a schema, changed in all of its parts, the outermost first.

    Parts of keywords that hold no positive schema, such as `not`, stay as they are.
    """
    if not isinstance(schema, Mapping):
        return schema
    new = dict(schema)
    change(new)
    for key, value in new.items():
        if key in _LISTS and isinstance(value, list):
            new[key] = [_mapped(each, change) for each in value]
        elif key in _ONE:
            new[key] = _mapped(value, change)
        elif key in _MAPS and isinstance(value, Mapping):
            new[key] = {name: _mapped(each, change) for name, each in value.items()}
    return new


def problem_of(unenforced: Sequence[Unenforced], result: Result) -> tuple[str, str] | None:
    """Why a complete answer breaks a schema: (place of the schema, what is wrong); None: it fits.

    A text beside calls is not looked at: the answer was calls or a text of the schema.
    """
    for part in unenforced:
        texts = [result.text] if part.tool is None and not result.tool_calls else []
        texts += [call.arguments for call in result.tool_calls if call.name == part.tool]
        for text in texts:
            problem = _problem(part.schema, text)
            if problem is not None:
                return part.place, problem[:MAX_PROBLEM]
    return None


def _problem(schema: str, text: str) -> str | None:
    import jsonschema_rs

    try:
        _validator(schema).validate(json.loads(text))
    except jsonschema_rs.ValidationError as error:
        pointer = "".join(f"/{step}" for step in error.instance_path)
        return f"{error.message} (at {pointer or 'the whole value'})"
    except (ValueError, RecursionError) as error:  # no JSON, or nothing that can be validated
        return str(error)
    return None


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """The validator of a schema; references to other documents are never fetched."""
    import jsonschema_rs

    return jsonschema_rs.validator_for(
        json.loads(schema),
        validate_formats=False,
        retriever=_no_document,
        pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS),
    )


def _no_document(uri: str) -> Any:
    raise ValueError(f"{uri[:100]} is another document")
