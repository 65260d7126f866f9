"""Functions of Python as tools: type hints and a docstring in Google's style become a schema.

The convention is that of transformers (`tools=[function]` of `apply_chat_template`).
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union

from ...errors import InvalidRequestError, shown

Schema = dict[str, Any]
_TYPES: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"(Args|Returns|Raises):")
_ARGUMENT = re.compile(r"\A(\w+)(?:[ \t]*\([^()]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def with_schemas(tools: Sequence[Any]) -> list[Any]:
    """The tools in OpenAI's form: each function by its schema, others as they are."""
    return [tool_of(tool) if callable(tool) else tool for tool in tools]


def tool_of(function: Callable[..., Any]) -> Schema:
    """A function as a tool: {"type": "function", "function": {...}}."""
    name = getattr(function, "__name__", None) or type(function).__name__
    sections = _sections(inspect.getdoc(function) or "")
    description = sections.get("", "")
    if not description:
        raise _wrong(name, "has no docstring that describes it")
    parameters, returned = _signature(name, function, _arguments(sections.get("Args", "")))
    tool: Schema = {"name": name, "description": description, "parameters": parameters}
    if returned is not None:
        if text := sections.get("Returns"):
            returned = {**returned, "description": text}
        tool["return"] = returned
    return {"type": "function", "function": tool}


def _signature(
    name: str, function: Callable[..., Any], texts: Mapping[str, str]
) -> tuple[Schema, Schema | None]:
    """The schema of the arguments, and that of the value; None: its hint says nothing."""
    given = inspect.signature(function).parameters
    target = function if inspect.isroutine(function) else type(function).__call__
    hints = typing.get_type_hints(target)
    properties: Schema = {}
    for argument, parameter in given.items():
        if parameter.annotation is parameter.empty:
            if argument in ("self", "cls") and not properties:
                continue
            raise _wrong(name, f"has no type hint for {argument!r}")
        if argument not in texts:
            raise _wrong(name, f"has no line for {argument!r} under Args: in its docstring")
        schema = _schema(hints[argument])
        if schema is None:
            raise _wrong(name, f"has {argument!r} of {hints[argument]}, which no schema says")
        properties[argument] = _described(name, schema, texts[argument])
    parameters: Schema = {"type": "object", "properties": properties}
    if required := [key for key in properties if given[key].default is inspect.Parameter.empty]:
        parameters["required"] = required
    return parameters, _schema(hints["return"]) if "return" in hints else None


def _described(name: str, schema: Schema, text: str) -> Schema:
    """The schema with a description; a list of choices at its end becomes an enum."""
    choices = _CHOICES.search(text)
    if choices is None:
        return {**schema, "description": text}
    try:
        values = [
            value.strip() if isinstance(value, str) else value for value in json.loads(choices[1])
        ]
    except (ValueError, TypeError) as error:
        raise _wrong(name, f"has choices {shown(choices[1])}; expected a list as JSON") from error
    return {**schema, "enum": values, "description": text[: choices.start()].strip()}


def _schema(hint: Any) -> Schema | None:
    """The schema of a type hint; None: there is none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enum([member.value for member in hint])
        return dict(_TYPES[hint]) if hint in _TYPES else None
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is Literal:
        return _enum(list(arguments))
    inner = [_schema(argument) for argument in arguments[origin is dict :]]  # keys are strings
    if None in inner or (origin is tuple and len(inner) < 2):
        return None
    if origin is list:
        return {"type": "array", "items": inner[0]}
    if origin is tuple:
        return {"type": "array", "prefixItems": inner}
    return {"type": "object", "additionalProperties": inner[-1]} if origin is dict else None


def _enum(values: list[Any]) -> Schema | None:
    kinds = [_TYPES[type(value)]["type"] for value in values if type(value) in _TYPES]
    if not values or len(kinds) < len(values):
        return None
    return {"type": _one_or_all(list(dict.fromkeys(kinds))), "enum": values}


def _union(hints: Sequence[Any]) -> Schema | None:
    schemas = [_schema(hint) for hint in hints if hint is not NoneType]
    known = [schema for schema in schemas if schema is not None]
    if len(known) < len(schemas):
        return None
    if len(known) == 1:
        union = known[0]
    elif all(list(schema) == ["type"] for schema in known):
        union = {"type": _one_or_all(sorted({schema["type"] for schema in known}))}
    else:
        union = {"anyOf": known}
    return {**union, "nullable": True} if NoneType in hints else union


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _sections(text: str) -> dict[str, str]:
    """The docstring's text before its sections, under "", and that of each section."""
    lines: dict[str, list[str]] = {"": []}
    section = ""
    for line in text.splitlines():
        if head := _SECTION.fullmatch(line.rstrip()):
            section = head[1]
        lines.setdefault(section, []).append("" if head else line)
    return {name: inspect.cleandoc("\n".join(part)).strip() for name, part in lines.items()}


def _arguments(text: str) -> dict[str, str]:
    """The description of each argument; lines that are indented more go on with it."""
    parts: dict[str, list[str]] = {}
    name = None
    for line in filter(str.strip, text.splitlines()):
        if match := _ARGUMENT.match(line):
            name = match[1]
            parts[name] = [match[2].strip()]
        elif name is not None:
            parts[name].append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in parts.items()}


def _wrong(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The tool {name}() {problem}. Expected type hints and a docstring with a line for each "
        "argument under Args:; or give the tool as a dict with its JSON schema.",
        param="tools",
    )
