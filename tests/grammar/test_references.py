"""Schemas that stand by themselves: references are followed, or answers checked later."""

import json
from typing import Any

import pytest
from grammar_tools import compiler_of, matches

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar import spec
from mlxinfer.grammar.relaxed import problem_of
from mlxinfer.outputs import Result

STRING: Any = {"type": "string"}
NODE: Any = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node", "minProperties": 1}, "a": STRING},
}
OPEN: Any = {"type": "object", "additionalProperties": {"$dynamicRef": "#node"}}
ALIKE: dict[str, tuple[Any, Any, Any]] = {  # schema, a value, what its grammar forbids
    "an anchor as id": ({"$id": "#a", "type": "integer"}, 1, "x"),
    "signs in a name": ({"$ref": "#/$defs/a<b>{c}", "$defs": {"a<b>{c}": STRING}}, "x", 1),
    "escapes": ({"$ref": "#/$defs/a%3Cb%3E", "$defs": {"a<b>": STRING}}, "x", 1),
    "an id inside": (
        {
            "$id": "https://a.example/root.json",
            "$ref": "text.json",
            "$defs": {"t": {"$id": "text.json", **STRING}},
        },
        "x",
        1,
    ),
    "a pointer below an id": (
        {"$ref": "b.json#/items", "$defs": {"b": {"$id": "b.json", "items": STRING}}},
        "x",
        1,
    ),
    "an anchor": ({"$ref": "#t", "$defs": {"t": {"$anchor": "t", **STRING}}}, "x", 1),
    "any place": (
        {"properties": {"a": STRING, "b": {"$ref": "#/properties/a"}}},
        {"b": "x"},
        {"b": 1},
    ),
    "a dynamic anchor": ({"$dynamicAnchor": "x", **STRING}, "x", 1),
    "an end of 64 bits": ({"type": "integer", "maximum": 9223372036854776000}, 7, 10**20),
    "a brace": ({"type": "string", "pattern": "^a{b}$"}, "a{b}", "ab"),
    "a bracket": ({"type": "string", "pattern": "^[0-9]{2}]?$"}, "12]", "12]]"),
    "braces that repeat": ({"type": "string", "pattern": r"^\p{Lu}{2}\{$"}, "AB{", "A{"),
    "a ring of ids": (
        {"$id": "l.json", "type": "object", "properties": {"next": {"$ref": "l.json"}}},
        {"next": {"next": {}}},
        {"next": 1},
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ALIKE)
def test_a_reference_is_followed(name: str, strict: bool) -> None:
    schema, good, bad = ALIKE[name]
    before = json.dumps(schema)
    grammar = spec.json_schema(schema, strict=strict)
    assert json.dumps(schema) == before
    assert grammar.unenforced == ()
    assert matches(grammar, json.dumps(good))
    assert not matches(grammar, json.dumps(bad))


LATER: dict[str, tuple[Any, Any, Any]] = {  # schema, a value of it, and one that the check refuses
    "a ring beside others": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"next": {"a": "x"}},
        {"next": {}},
    ),
    "a dynamic ring": (
        {"$dynamicAnchor": "node", **OPEN, "$defs": {"n": {"$dynamicAnchor": "node", **OPEN}}},
        {"a": {}},
        {"a": 1},
    ),
    "a metaschema": (
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"type": "string"},
        {"type": "text"},
    ),
    "a ring in an allOf": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "next": {"allOf": [{"$ref": "#/$defs/node"}, {"required": ["a"]}]},
                        "a": STRING,
                    },
                }
            },
        },
        {"next": {"a": "x"}},
        {"next": {"next": {"a": "x"}, "a": 1}},
    ),
    "signs in a name": (
        {"items": {"$ref": "#/$defs/a <b>{c}"}, "uniqueItems": True, "$defs": {"a <b>{c}": STRING}},
        ["x", "y"],
        ["x", "x"],
    ),
    "an end within a pattern": (
        {"type": "string", "pattern": "^/(([a-z]+/)*[a-z]+$)?"},
        "/a/b",
        "a/b",
    ),
    "a beginning that may be left out": (
        {"type": "string", "pattern": "^(?:^[a-z]+:)?[0-9]$"},
        "ab:1",
        "ab1",
    ),
    "a wide bound": ({"type": "number", "maximum": 9223372036854776000}, 1, 1e30),
}


@pytest.mark.parametrize("name", LATER)
def test_what_cannot_be_followed_is_checked_later(name: str) -> None:
    schema, good, bad = LATER[name]
    grammar = spec.json_schema(schema)
    assert grammar.unenforced
    compiler_of().compile(grammar)
    assert matches(grammar, json.dumps(good))
    assert problem_of(grammar.unenforced, Result(text=json.dumps(good))) is None
    assert problem_of(grammar.unenforced, Result(text=json.dumps(bad))) is not None
    with pytest.raises(InvalidRequestError):
        compiler_of().compile(spec.json_schema(schema, strict=True))


def test_another_document_is_refused() -> None:
    for reference in ("https://evil.example/a.json", "a.json#/b", "file:///etc/passwd"):
        with pytest.raises(InvalidRequestError, match="another document"):
            spec.json_schema({"properties": {"a": {"$ref": reference}}})


def test_names_of_properties_are_no_keywords() -> None:
    schema: Any = {"type": "object", "properties": {"$id": True, "id": STRING}, "$id": "a.json"}
    grammar = spec.json_schema(schema)
    assert matches(grammar, '{"$id": 1, "id": "x"}')
    assert not matches(grammar, '{"id": 1}')
