"""Schemas in other keywords: they accept the same values, and llguidance takes them."""

import copy
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar.schema import mapped, rewrite
from mlxinfer.grammar.spec import json_schema

AB: Any = {"a": {"type": "integer"}, "b": {"enum": ["x", "y", 1]}}
IF_X: Any = {"properties": {"b": {"const": "x"}}}
SCHEMAS: list[dict[str, Any]] = [
    {"properties": AB, "dependentRequired": {"a": ["b"]}},
    {"properties": AB, "dependentRequired": {"a": ["b"], "b": ["c"]}, "anyOf": [True]},
    {"properties": AB, "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
    {"properties": AB, "dependentSchemas": {"b": {"properties": {"a": {"minimum": 2}}}}},
    {"properties": AB, "dependencies": {"a": {"not": {"required": ["b"]}, "type": "object"}}},
    {"type": "object", "properties": AB, "if": IF_X, "then": {"required": ["a"]}},
    {"type": "object", "properties": AB, "if": IF_X, "then": False, "else": {"required": ["a"]}},
    {
        "type": "object", "properties": AB, "if": {**IF_X, "required": ["b"]},
        "then": {"required": ["a"]}, "else": {"required": ["c"]},
    },
    {
        "type": "object",
        "properties": AB,
        "if": {"type": "object", "properties": {"b": {"enum": ["y", 1]}}},
        "else": {"properties": {"a": False}},
    },
    {"if": {"type": "string"}, "properties": AB},
    {"then": False, "else": False, "properties": AB},
    {"enum": ["x", 1, True, None, 2], "not": {"enum": [1, None]}},
    {"enum": ["x", 1, True], "not": {"const": True}},
    {"type": ["string", "null", "object"], "not": {"type": "null"}},
    {"type": ["string", "null", "integer"], "not": {"type": ["null", "string"]}},
    {"type": "object", "not": {"required": ["a"]}},
    {"type": "object", "not": {"required": ["a", "b"]}},
    {"properties": AB, "not": False},
    {"properties": {**AB, "c": {"not": {}}}, "required": ["a"]},
    {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"enum": ["a", "c"]}},
    {"propertyNames": True, "properties": AB},
    {"properties": AB, "unevaluatedProperties": False},
    {"properties": AB, "unevaluatedProperties": False, "additionalProperties": True},
    {"type": "array", "uniqueItems": False, "items": {"type": "integer"}},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"unevaluatedItems": True, "items": {"type": "integer"}},
    {"properties": {"a": {"properties": AB, "dependentRequired": {"a": ["b"]}}}},
]  # fmt: skip
LEAVES = st.sampled_from([None, True, False, 1, 1.0, 2, "x", "y", "z"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "c", "ab"]), inner, max_size=3),
    ),
    max_leaves=5,
)
OVERLAPPING: Any = {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"required": ["b"]}]}


@pytest.mark.alike
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@given(value=VALUES)
def test_a_rewritten_schema_accepts_the_same_values(schema: dict[str, Any], value: Any) -> None:
    before = copy.deepcopy(schema)
    new = mapped(schema, rewrite)
    assert schema == before
    validator = jsonschema.Draft202012Validator
    if "dependencies" in schema:  # of draft 7
        validator = jsonschema.Draft7Validator  # type: ignore[assignment]
    assert validator(schema).is_valid(value) is jsonschema.Draft202012Validator(new).is_valid(value)


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_llguidance_takes_a_rewritten_schema(schema: dict[str, Any]) -> None:
    spec = json_schema(schema)
    assert not LLMatcher.validate_grammar(spec.source)


@pytest.mark.parametrize("kind", ["string", "integer"])
def test_unknown_formats_are_annotations(kind: str) -> None:
    schema = {"properties": {"a": {"type": kind, "format": "color"}}}
    assert mapped(schema, rewrite) == {"properties": {"a": {"type": kind}}}
    kept: dict[str, Any] = {"properties": {"format": {"type": "string", "format": "date"}}}
    assert mapped(kept, rewrite) == kept


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"uniqueItems": True},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"properties": AB, "propertyNames": {"pattern": "^a"}},
        {"anyOf": [{"properties": AB}], "unevaluatedProperties": False},
    ],
    ids=json.dumps,
)
def test_what_has_no_equivalent_is_left_to_be_refused(schema: dict[str, Any]) -> None:
    assert mapped(schema, rewrite) == schema
    assert LLMatcher.validate_grammar(json_schema(schema, strict=True).source)


def test_one_of_is_any_of_unless_strict() -> None:
    assert not LLMatcher.validate_grammar(json_schema(OVERLAPPING).source)
    refused = LLMatcher.validate_grammar(json_schema(OVERLAPPING, strict=True).source)
    assert "oneOf" in refused
    asked = {**OVERLAPPING, "x-guidance": {"coerce_one_of": True}}
    assert not LLMatcher.validate_grammar(json_schema(asked, strict=True).source)
    refused = {**OVERLAPPING, "x-guidance": {"coerce_one_of": False}}
    assert LLMatcher.validate_grammar(json_schema(refused).source)


@pytest.mark.parametrize(
    "options",
    [
        {"whitespace_flexible": True},
        {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        {"whitespace_pattern": "[ ]?"},
    ],
)
def test_options_of_spacing_are_honoured(options: dict[str, Any]) -> None:
    spec = json_schema({"type": "object", "x-guidance": options})
    assert not LLMatcher.validate_grammar(spec.source)
    written = json.loads(spec.main)["json_schema"]["x-guidance"]
    assert options.items() <= written.items()
    assert written["lenient"] is False


@pytest.mark.parametrize(
    "options", [{"lenient": True}, {"item_separator": 1}, {"whitespace_pattern": "x" * 201}, 5]
)
def test_other_options_are_refused(options: Any) -> None:
    with pytest.raises(InvalidRequestError, match="x-guidance"):
        json_schema({"type": "object", "x-guidance": options})
