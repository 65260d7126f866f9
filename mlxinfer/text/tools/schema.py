"""What the schemas of tools say of names and types. Knows JSON schemas; reads no answers."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import InvalidRequestError, shown
from .flat import MAX_PLACES, Flat, Schema, flattened, resolve, sequence
from .jsontext import without_halves
from .pyliteral import python_to_json

_INTEGER = re.compile(r"[-+]?[0-9]{1,400}(?:\.0*)?")
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call."""

    name: str
    description: str = ""
    parameters: Schema = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # calls have to keep to the schema
    _flat: Flat = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_flat", flattened(self.parameters))

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each parameter."""
        return self._flat.properties

    @property
    def required(self) -> Collection[str]:
        """The parameters that must be given."""
        return self._flat.required

    def types_of(self, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter may have; none where the schema does not say."""
        schema = self.properties.get(parameter, self._flat.others)
        return frozenset(_types(schema, self.parameters))


class Toolbox:
    """The tools of one request, by name."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> "Toolbox":
        """From OpenAI's form, {"type": "function", "function": {"name": ...}}, or the inner object.

        Raises:
            InvalidRequestError: a tool is no function, has no name, or the name of another.
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

    def get(self, name: str) -> Tool:
        """Return the tool; of a name that nobody declared, one without parameters."""
        return self._tools.get(name) or Tool(name)


def _parse(tool: object, place: int) -> Tool:
    where = f"tools[{place}]"
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(f"{where} is {shown(tool)}; expected an object.", param="tools")
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


def _types(schema: object, root: Schema) -> Iterator[str]:
    """The types that a schema and its alternatives name."""
    waiting = [schema]
    for _ in range(MAX_PLACES):
        if not waiting:
            return
        place = waiting.pop()
        if not isinstance(place, Mapping):
            continue
        yield from _own_types(place)
        for choice in ("anyOf", "oneOf", "allOf"):
            waiting += sequence(place.get(choice))[:MAX_PLACES]
        reference = place.get("$ref")
        if isinstance(reference, str):
            waiting.append(resolve(reference, root))


def _own_types(schema: Schema) -> Iterator[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif declared is not None:
        yield from (kind for kind in sequence(declared) if isinstance(kind, str))
    elif "enum" in schema:
        yield from (_TYPE_OF.get(type(value), "null") for value in sequence(schema["enum"]))
    elif "const" in schema:
        yield _TYPE_OF.get(type(schema["const"]), "null")


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written without quotes, as its types want it.

    Of several types the first that fits counts: null, boolean, integer, number, object or array,
    string. What fits none is a string, so that nothing is lost. Without any type a value that is
    JSON is taken as such.
    """
    if not types:
        return _any_json(text) or json.dumps(text, ensure_ascii=False)
    plain = text.strip()
    if "null" in types and plain.lower() in ("null", "none"):
        return "null"
    if "boolean" in types and plain.lower() in ("true", "false"):
        return plain.lower()
    if types & {"integer", "number"} and _INTEGER.fullmatch(plain):
        return str(int(plain.partition(".")[0]))
    if "number" in types and (number := _number(plain)) is not None:
        return number
    if types & {"object", "array"} and (found := _container(plain)) is not None:
        return found
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
    """An object or a list in JSON, or in Python where a model writes that; None for neither."""
    found = _any_json(text) or _any_json(python_to_json(text) or "")
    return found if found is not None and found[0] in "[{" else None
