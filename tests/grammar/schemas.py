"""JSON schemas as tools and forms have them, drawn from one random generator. All are bounded."""

import random
from typing import Any

NAMES = (
    "name", "title", "city", "street", "country", "email", "phone", "status", "kind",
    "priority", "age", "count", "price", "weight", "tags", "notes", "unit", "query",
    "path", "limit", "offset", "active", "verified", "created", "due", "owner", "items",
    "address"
)  # fmt: skip
WORDS = ("low", "medium", "high", "open", "closed", "celsius", "fahrenheit", "a b", 'q"uote', "é")
PATTERNS = (
    "^[A-Z]{2}[0-9]{4}$",
    "^[a-z]+(-[a-z]+){0,3}$",
    "^\\+?[0-9]{6,12}$",
    "^(GET|PUT) /\\w+$",
)
FORMATS = ("date", "email", "uuid", "ipv4", "date-time", "time")
Schema = dict[str, Any]


def draw_schema(rng: random.Random) -> Schema:
    """An object with some properties; now and then with definitions that are referred to."""
    definitions = {f"Part{i}": _object(rng, 1, ()) for i in range(rng.choice([0, 0, 1, 2]))}
    schema = _object(rng, 3, tuple(definitions))
    if definitions:
        schema["$defs"] = definitions
    if rng.random() < 0.3:
        schema["title"] = "A form"
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


def _object(rng: random.Random, depth: int, parts: tuple[str, ...]) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 5))
    properties = {name: _described(rng, _value(rng, depth - 1, parts)) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required or rng.random() < 0.5 else {}),
    }


def _described(rng: random.Random, schema: Schema) -> Schema:
    return {"description": "What it is.", **schema} if rng.random() < 0.3 else schema


def _value(rng: random.Random, depth: int, parts: tuple[str, ...]) -> Schema:
    simple = [_string, _string, _choice, _integer, _number, _boolean, _nullable]
    if depth > 0 and rng.random() < 0.35:
        return rng.choice([_object, _array, _any_of])(rng, depth, parts)
    if parts and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(parts)}"}
    return rng.choice(simple)(rng)


def _array(rng: random.Random, depth: int, parts: tuple[str, ...]) -> Schema:
    low = rng.choice([0, 0, 1, 2])
    return {
        "type": "array",
        "items": _value(rng, depth - 1, parts),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int, parts: tuple[str, ...]) -> Schema:
    return {"anyOf": [_value(rng, depth - 1, parts) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random) -> Schema:
    kind = rng.random()
    if kind < 0.2:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 24}
    if kind < 0.35:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    low = rng.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(1, 24)}


def _choice(rng: random.Random) -> Schema:
    values = rng.sample(WORDS, rng.randint(1, 4))
    return {"const": values[0]} if len(values) == 1 else {"type": "string", "enum": values}


def _integer(rng: random.Random) -> Schema:
    low = rng.choice([0, 1, -10, 18, 1900])
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.choice([1, 9, 150])}
    return {**schema, "multipleOf": 5} if low == 0 and rng.random() < 0.3 else schema


def _number(rng: random.Random) -> Schema:
    return {"type": "number", "minimum": rng.choice([0, -90.5]), "maximum": rng.choice([1, 180])}


def _boolean(rng: random.Random) -> Schema:
    return {"type": "boolean"}


def _nullable(rng: random.Random) -> Schema:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": rng.choice([3, 1000])}
