"""Schemas as tools and forms have them, each with documents that satisfy it. Knows no engine."""

import json
from dataclasses import dataclass
from typing import Any

TEXT = (
    "A page table says where the keys and values of a sequence lie; pages are handed out as the "
    "text grows and come back when the request ends. "
)


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and texts that an answer under it may be."""

    name: str
    schema: dict[str, Any]
    documents: tuple[Any, ...]

    @property
    def texts(self) -> list[str]:
        """The documents as models write them: on one line, and indented."""
        return [json.dumps(self.documents[0]), *[json.dumps(d, indent=2) for d in self.documents]]


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


_STRING = {"type": "string"}
_ADDRESS = _object(
    {
        "street": _STRING,
        "city": {"type": "string", "maxLength": 40},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["DE", "FR", "IN", "JP", "US"]},
    },
    "country",
)
CASES = (
    Case(
        "tool call",
        _object(
            {
                "city": _STRING,
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "unit",
            "days",
        ),
        ({"city": "Lyon", "days": 3}, {"city": "Sao Paulo", "unit": "celsius", "days": 14}),
    ),
    Case(
        "form",
        _object(
            {
                "name": {"type": "string", "minLength": 1, "maxLength": 60},
                "email": {"type": "string", "format": "email"},
                "born": {"type": "string", "format": "date"},
                "address": _ADDRESS,
                "newsletter": {"type": "boolean"},
                "notes": {"type": ["string", "null"]},
            },
            "notes",
        ),
        (
            {
                "name": "Grace Hopper",
                "email": "grace@example.org",
                "born": "1906-12-09",
                "address": {"street": "12 Harbour Road", "city": "New York", "zip": "10001"},
                "newsletter": False,
                "notes": TEXT,
            },
        ),
    ),
    Case(
        "extraction",
        _object(
            {
                "summary": _STRING,
                "sentiment": {"enum": ["negative", "neutral", "positive"]},
                "topics": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
                "scores": {"type": "array", "items": {"type": "number", "minimum": 0}},
            }
        ),
        (
            {
                "summary": TEXT * 2,
                "sentiment": "positive",
                "topics": ["paged attention", "memory", "KV cache"],
                "scores": [0.25, 3, 17.5],
            },
        ),
    ),
    Case(
        "tree with references",
        {
            "$defs": {
                "node": _object(
                    {
                        "kind": {"enum": ["folder", "file"]},
                        "name": _STRING,
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "children",
                )
            },
            "$ref": "#/$defs/node",
        },
        (
            {
                "kind": "folder",
                "name": "src",
                "children": [
                    {"kind": "file", "name": "main.py"},
                    {"kind": "folder", "name": "tests", "children": []},
                ],
            },
        ),
    ),
    Case(
        "one of many tools",
        {
            "anyOf": [
                _object(
                    {
                        "name": {"const": f"tool_{number}"},
                        "arguments": _object(
                            {"query": _STRING, "limit": {"type": "integer"}, f"flag_{number}": {}},
                            "limit",
                            f"flag_{number}",
                        ),
                    }
                )
                for number in range(24)
            ]
        },
        ({"name": "tool_17", "arguments": {"query": "pages of a tail", "limit": 5}},),
    ),
    Case("any object", {"type": "object"}, ({"a": [1, 2.5, None], "b": {"c": "x", "d": TEXT}},)),
)
ENDLESS = "start: item+\nitem: %json " + json.dumps(CASES[1].schema) + ' "\\n"\n'
