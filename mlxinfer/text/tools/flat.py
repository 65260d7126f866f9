"""The parameters of a tool at one place, wherever its schema has them. Knows JSON schemas alone.

Formats that write parameters one by one need the name and schema of each. References and `allOf`
are followed; of alternatives all parameters count, and none has to be given.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ...errors import InvalidRequestError

Schema = Mapping[str, Any]

MAX_PLACES = 200  # of a schema that are looked at: it may refer to itself
ALTERNATIVES = ("anyOf", "oneOf")
LITERALS = ("const", "enum", "default", "examples")  # hold values, and no schemas
HOME = "#/$defs/tool"  # where a tool's schema is in the document of one of its parameters


@dataclass(slots=True)
class Flat:
    """What a schema says of an object's members."""

    properties: dict[str, object] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)  # in order
    others: object = None  # the schema of those without one of their own

    def add(self, name: str, schema: object, *, alternative: bool) -> None:
        """A member, of which another place may have spoken already."""
        before = self.properties.get(name, schema)
        if before != schema:
            schema = {"anyOf" if alternative else "allOf": [before, schema]}
        self.properties[name] = schema


def flattened(root: Schema) -> Flat:
    """The members of what a schema allows; such that it demands and says nothing of included."""
    found = Flat()
    for place, alternative in _places(root):
        for name, schema in _mapping(place.get("properties")).items():
            found.add(name, schema, alternative=alternative)
        if not alternative:
            required = sequence(place.get("required"))
            found.required |= dict.fromkeys(n for n in required if isinstance(n, str))
        if found.others is None and isinstance(place.get("additionalProperties"), Mapping):
            found.others = place["additionalProperties"]
    for name in found.required:
        found.properties.setdefault(name, {} if found.others is None else found.others)
    return found


def _places(root: Schema) -> Iterator[tuple[Schema, bool]]:
    """The schemas that one is put together from, and whether each is an alternative."""
    waiting: list[tuple[object, bool]] = [(root, False)]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_PLACES:
        place, alternative = waiting.pop(0)
        if not isinstance(place, Mapping) or id(place) in seen:
            continue
        seen.add(id(place))
        yield place, alternative
        if isinstance(place.get("$ref"), str):
            waiting.append((resolve(place["$ref"], root), alternative))
        waiting += [(part, alternative) for part in sequence(place.get("allOf"))]
        for choice in ALTERNATIVES:
            waiting += [(part, True) for part in sequence(place.get(choice))]


def resolve(reference: str, root: Schema) -> object:
    """What a reference within the document points at (RFC 6901, in a URI); None: nothing."""
    if not reference.startswith("#"):
        return None
    place: object = root
    for key in unquote(reference[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(key)
        elif isinstance(place, (list, tuple)) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place


def listed(schema: object, root: Schema) -> list[object]:
    """The values that an `enum` or `const` allows, where a reference stands for it, too."""
    for _ in range(MAX_PLACES):
        own = _mapping(schema)
        if "enum" in own or "const" in own:
            return list(sequence(own.get("enum"))) or [own.get("const")]
        parts = sequence(own.get("allOf"))
        if isinstance(own.get("$ref"), str):
            schema = resolve(own["$ref"], root)
        elif len(parts) == 1:  # how a reference is written that has a default beside it
            schema = parts[0]
        else:
            break
    return []


def standing_alone(schema: object, root: Schema) -> Schema:
    """A parameter's schema as a document, with all of the tool's if it refers to anything.

    Raises:
        InvalidRequestError: it is nested too deeply.
    """
    own = _mapping(schema)
    try:
        if not _refers(own):
            return own
        moved: dict[str, Any] = _moved(own)
        return {**moved, "$defs": {**_mapping(moved.get("$defs")), "tool": _moved(root)}}
    except RecursionError:
        raise InvalidRequestError(
            "The schema of a tool's parameters is nested too deeply to force calls of it.",
            param="tools",
        ) from None


def _refers(value: object) -> bool:
    if isinstance(value, Mapping):
        return "$ref" in value or any(_refers(inner) for inner in value.values())
    return isinstance(value, (list, tuple)) and any(map(_refers, value))


def _moved(value: Any, key: str = "") -> Any:
    """The same where the document stands at HOME."""
    if key in LITERALS:
        return value
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return HOME + value[1:]
    if isinstance(value, Mapping):
        return {name: _moved(inner, name) for name, inner in value.items()}
    return [_moved(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def sequence(value: object) -> Sequence[Any]:
    """A list of a schema; nothing where it is none."""
    return value if isinstance(value, (list, tuple)) else ()
