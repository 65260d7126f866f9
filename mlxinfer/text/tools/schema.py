"""The tools of a request and the JSON schemas of their parameters.

Formats that write parameters one by one need the name, schema and types of each. References and
`allOf` are followed. The parameters of all alternatives (`anyOf`, `oneOf`) count, and none of these
is required.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from urllib.parse import unquote

from ...errors import InvalidRequestError, shown, wrong_value
from .values import python_to_json, without_halves

Schema = Mapping[str, Any]

MAX_PLACES = 200  # of a schema that are looked at: it may refer to itself
ALTERNATIVES = ("anyOf", "oneOf")
MAX_ALTERNATIVES = 64  # of a tool's root: its parameters are written out for each
LITERALS = ("const", "enum", "default", "examples")  # hold values, and no schemas
HOME = "#/$defs/tool"  # where a tool's schema is in the document of one of its parameters


_INTEGER = re.compile(r"[-+]?[0-9]{1,400}(?:\.0*)?")
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(slots=True)
class FlatSchema:
    """The members of an object that a schema describes, wherever in it they stand."""

    properties: dict[str, object] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)  # in order
    others: object = None  # the schema of those without one of their own

    def add(self, name: str, schema: object, *, alternative: bool) -> None:
        """Add a member, which another place of the schema may have described already."""
        before = self.properties.get(name, schema)
        if before != schema:
            schema = {"anyOf" if alternative else "allOf": [before, schema]}
        self.properties[name] = schema


def flatten(root: Schema) -> FlatSchema:
    """Return the members that a schema allows, those included that it only requires."""
    flat = FlatSchema()
    for place, alternative in _places(root, root):
        for name, schema in _mapping(place.get("properties")).items():
            flat.add(name, schema, alternative=alternative)
        if not alternative:
            required = as_list(place.get("required"))
            flat.required |= dict.fromkeys(n for n in required if isinstance(n, str))
        if flat.others is None and isinstance(place.get("additionalProperties"), Mapping):
            flat.others = place["additionalProperties"]
    for name in flat.required:
        flat.properties.setdefault(name, {} if flat.others is None else flat.others)
    return flat


def _places(schema: object, root: Schema) -> Iterator[tuple[Schema, bool]]:
    """Yield the schemas that a schema is composed of, and whether each is an alternative."""
    waiting: deque[tuple[object, bool]] = deque([(schema, False)])
    seen: set[int] = set()
    while waiting and len(seen) < MAX_PLACES:
        place, alternative = waiting.popleft()
        if not isinstance(place, Mapping) or id(place) in seen:
            continue
        seen.add(id(place))
        yield place, alternative
        if isinstance(place.get("$ref"), str):
            waiting.append((resolve(place["$ref"], root), alternative))
        waiting += [(part, alternative) for part in as_list(place.get("allOf"))]
        for choice in ALTERNATIVES:
            waiting += [(part, True) for part in as_list(place.get(choice))]


def resolve(reference: str, root: Schema) -> object:
    """Return what a reference within the document points at (RFC 6901, in a URI), or None."""
    if not reference.startswith("#"):
        return None
    place: object = root
    for step in reference.split("/")[1:]:
        names = [name.replace("~1", "/").replace("~0", "~") for name in (step, unquote(step))]
        if isinstance(place, Mapping):
            place = next((place[name] for name in names if name in place), None)
        elif isinstance(place, (list, tuple)) and step.isdecimal() and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place


def enum_values(schema: object, root: Schema) -> list[object]:
    """Return the values of an `enum` or `const`, also where a reference leads to it."""
    for _ in range(MAX_PLACES):
        plain = _mapping(schema)
        if "enum" in plain or "const" in plain:
            return list(as_list(plain.get("enum"))) or [plain.get("const")]
        parts = as_list(plain.get("allOf"))
        if isinstance(plain.get("$ref"), str):
            schema = resolve(plain["$ref"], root)
        elif len(parts) == 1:  # how a reference is written that has a default beside it
            schema = parts[0]
        else:
            break
    return []


def standalone_schema(schema: object, root: Schema) -> Schema:
    """Return a parameter's schema as a document, with the tool's schema if it refers to that."""
    plain = _mapping(schema)
    if not any(_references(plain)):
        return plain
    moved: dict[str, Any] = _moved(plain)
    return {**moved, "$defs": {**_mapping(moved.get("$defs")), "tool": _moved(root)}}


def _allows_object(schema: object) -> bool:
    types = _mapping(schema).get("type", "object")
    return schema is not False and (types == "object" or "object" in as_list(types))


def _references(value: object) -> Iterator[str]:
    stack = [value]
    while stack:
        place = stack.pop()
        if isinstance(place, Mapping):
            if "$ref" in place:
                yield str(place["$ref"])
            stack += place.values()
        elif isinstance(place, (list, tuple)):
            stack += place


def _moved(value: Any, key: str = "") -> Any:
    if key in LITERALS:
        return value
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return HOME + value[1:]
    if isinstance(value, Mapping):
        return {name: _moved(inner, name) for name, inner in value.items()}
    return [_moved(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> Sequence[Any]:
    """Return a list of a schema, [] for any other value."""
    return value if isinstance(value, (list, tuple)) else ()


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call."""

    name: str
    description: str = ""
    parameters: Schema = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # calls have to keep to the schema
    _flat: FlatSchema = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_flat", flatten(self.parameters))

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._flat.properties

    @property
    def required(self) -> Collection[str]:
        return self._flat.required

    def alternatives(self) -> list["Tool"]:
        """Return this tool once for each alternative of its schema's root, or as it is.

        A call that keeps to one of them keeps to the schema. Alternatives within a property, and
        those of a schema that refers to its own root, stay as they are.
        """
        root = self.parameters
        options = {k: [o for o in as_list(root.get(k)) if _allows_object(o)] for k in ALTERNATIVES}
        options = {keyword: parts for keyword, parts in options.items() if parts}
        count = math.prod(map(len, options.values()))
        leads_back = (r == "#" or r.startswith(("#/anyOf", "#/oneOf")) for r in _references(root))
        if not options or count > MAX_ALTERNATIVES or any(leads_back):
            return [self]
        rest = {key: value for key, value in root.items() if key not in options}
        shared = as_list(root.get("allOf"))
        return [
            replace(self, parameters={**rest, "allOf": [*shared, *chosen]})
            for chosen in product(*options.values())
        ]

    def types_of(self, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have; none where the schema has no type."""
        return _types(self.properties.get(parameter, self._flat.others), self.parameters)


class ArgumentSchema:
    """A value within the arguments of a call: what its schema says of it.

    Args:
        schema: of the value; anything that is no object says nothing.
        root: the document that references are looked up in.
    """

    def __init__(self, schema: object, root: Schema) -> None:
        self._schema, self._root = schema, root
        self._inner: dict[str | None, ArgumentSchema] = {}

    def conversion(self) -> Callable[[str], str] | None:
        """Return what makes the JSON of a string; None if the value may be a string."""
        types = _types(self._schema, self._root)
        return None if not types or "string" in types else lambda text: json_of(text, types)

    def member(self, name: str) -> "ArgumentSchema":
        return self._within(name, ("properties", name), ("additionalProperties",))

    def item(self) -> "ArgumentSchema":
        return self._within(None, ("items",))

    def _within(self, key: str | None, *paths: tuple[str, ...]) -> "ArgumentSchema":
        """Return a place within; the first of the paths that any schema of the value has."""
        if key not in self._inner:
            schemas = [schema for schema, _ in _places(self._schema, self._root)]
            inner = [_at(schema, path) for path in paths for schema in schemas]
            chosen = next((part for part in inner if isinstance(part, Mapping)), None)
            self._inner[key] = ArgumentSchema(chosen, self._root)
        return self._inner[key]


def _at(schema: object, path: Sequence[str]) -> object:
    for step in path:
        schema = _mapping(schema).get(step)
    return schema


def _types(schema: object, root: Schema) -> frozenset[str]:
    return frozenset(kind for place, _ in _places(schema, root) for kind in _own_types(place))


class Toolbox:
    """The tools of one request, by name."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> "Toolbox":
        """Return the tools of a request: OpenAI's {"type": "function", "function": {...}}, or inner
        objects.
        """
        parsed = [_parse(tool, place) for place, tool in enumerate(tools)]
        seen: set[str] = set()
        for tool in parsed:
            if tool.name in seen:
                raise InvalidRequestError(f"Two tools are called {tool.name!r}.", param="tools")
            seen.add(tool.name)
        return cls(parsed)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def alternatives(self) -> Iterator[Tool]:
        """Yield each tool once for each alternative of its schema's root."""
        for tool in self:
            yield from tool.alternatives()

    def get(self, name: str) -> Tool:
        """Return the tool; for an undeclared name one without parameters."""
        return self._tools.get(name) or Tool(name)


def _parse(tool: object, place: int) -> Tool:
    where = f"tools[{place}]"
    if not isinstance(tool, Mapping):
        raise wrong_value(where, tool, "an object", "tools")
    if tool.get("type", "function") != "function":
        raise InvalidRequestError(
            f"{where} has the type {shown(tool['type'])}; only tools of type 'function' are known.",
            param="tools",
        )
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not re.fullmatch(r"[\w.:/-]{1,256}", name):
        raise InvalidRequestError(
            f"{where} has the name {shown(name)}; expected up to 256 letters, digits or any of "
            "_-.:/",
            param="tools",
        )
    parameters = function.get("parameters")
    tool = Tool(name, str(function.get("description") or ""), strict=function.get("strict") is True)
    if parameters is None:
        return tool
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"{where}: parameters is no JSON schema.", param="tools")
    if parameters.get("type", "object") not in ("object", ["object"]):
        raise InvalidRequestError(
            f"{where}: arguments are an object, but parameters is a schema of another type.",
            param="tools",
        )
    if "type" not in parameters and "$ref" not in parameters:  # else a forced call could be a text
        parameters = {"type": "object", **parameters}
    return replace(tool, parameters=parameters)


def _own_types(schema: Schema) -> Iterator[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif declared is not None:
        yield from (kind for kind in as_list(declared) if isinstance(kind, str))
    elif "enum" in schema:
        yield from (_TYPE_OF.get(type(value), "null") for value in as_list(schema["enum"]))
    elif "const" in schema:
        yield _TYPE_OF.get(type(schema["const"]), "null")


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written without quotes, by the types it may have.

    Of several types the first that fits counts: null, boolean, integer, number, object or array,
    string. A value that fits none becomes a string, so that nothing is lost. Without any type a
    value that is JSON is taken as such.
    """
    if not types:
        return _any_json(text) or json.dumps(text, ensure_ascii=False)
    plain = text.strip()
    if "string" not in types and plain[:1] == '"' == plain[-1:]:  # a number between quotes
        quoted = _any_json(plain)
        plain = json.loads(quoted).strip() if quoted else plain
    if "null" in types and plain.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and plain.lower() in ("true", "false"):
        return plain.lower()
    if types & {"integer", "number"} and _INTEGER.fullmatch(plain):
        return str(int(plain.partition(".")[0]))
    if "number" in types and (number := _number(plain)) is not None:
        return number
    if types & {"object", "array"} and (container := _container(plain)) is not None:
        return container
    if plain.lower() == "null" and "string" not in types:
        return "null"
    return json.dumps(text, ensure_ascii=False)


def _any_json(text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
        return without_halves(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _number(text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _container(text: str) -> str | None:
    """Return an object or list written as JSON or as a Python literal, None for any other text."""
    json_text = _any_json(text) or _any_json(python_to_json(text) or "")
    return json_text if json_text is not None and json_text[0] in "[{" else None
