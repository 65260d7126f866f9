"""response_format to a description: what is accepted, and how the rest is refused."""

import json
from decimal import Decimal
from typing import Any

import pytest
from grammar.grammar_tools import matches

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar import response_format
from mlxinfer.grammar.schema import MAX_DEPTH, MAX_PROPERTIES, MAX_STRING
from mlxinfer.grammar.spec import json_schema

NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def wrapped(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def test_nothing_and_text_are_any_text() -> None:
    assert response_format(None) is None
    assert response_format({"type": "text"}) is None


def test_equal_formats_are_one_key() -> None:
    one, other = response_format(wrapped(NAME)), response_format(wrapped(dict(NAME), strict=True))
    assert one == other
    assert hash(one) == hash(other)
    flat = response_format({"type": "json_schema", "name": "x", "schema": NAME, "strict": False})
    assert flat.main == one.main
    assert response_format({"type": "json_object"}) != one


WRONG: list[tuple[object, str, str]] = [
    (5, "response_format", "expected"),
    ({}, "response_format", "json_schema"),
    ({"type": "xml"}, "response_format", "xml"),
    ({"type": ["text"]}, "response_format", "expected"),
    ({"type": "text", "more": 1}, "response_format.more", "more"),
    ({"type": "json_object", "schema": [1]}, "response_format.schema", "list"),
    ({"type": "json_object", "more": 1}, "response_format.more", "not supported"),
    ({"type": "json_schema"}, "response_format.schema", "missing"),
    ({"type": "json_schema", "json_schema": 3}, "response_format.json_schema", "an object"),
    (wrapped(None), "response_format.json_schema.schema", "missing"),
    (wrapped(NAME, strict="yes"), "response_format.json_schema", "strict"),
    (wrapped(NAME, other=1), "response_format.json_schema.other", "other"),
    (wrapped([1]), "response_format.json_schema.schema", "list"),
    (wrapped(False), "response_format.json_schema.schema", "nothing satisfies"),
    ({"type": "regex"}, "response_format.regex", "not empty"),
    ({"type": "regex", "regex": "x" * 5000}, "response_format.regex", "5000"),
    ({"type": "regex", "regex": "\ud800"}, "response_format.regex", "Unicode"),
    ({"type": "choice", "choice": []}, "response_format.choice", "list"),
    ({"type": "choice", "choice": ["a", 1]}, "response_format.choice[1]", "text"),
    ({"type": "grammar", "grammar": ""}, "response_format.grammar", "empty"),
]


def test_what_is_wrong_is_named() -> None:
    for value, param, words in WRONG:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            response_format(value)
        assert caught.value.param == param
        assert caught.value.status == 400


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_a_schema_that_is_not_worth_trying() -> None:
    not_tried: list[tuple[dict[str, Any], str]] = [
        (nested(900), f"more than {MAX_DEPTH} levels"),
        (nested(50_000), f"more than {MAX_DEPTH} levels"),
        ({"enum": ["x" * (MAX_STRING + 1)]}, "at /enum/0: a string"),
        ({"const": {"description": "x" * 5000}}, "at /const/description"),
        ({"properties": {"y" * 5000: {}}}, "at /properties: a name of 5000"),
        ({"properties": {"a/b~c": {"$ref": "http://x/y"}}}, "at /properties/a~1b~0c.*document"),
        ({"properties": {"p": {"$ref": "other.json"}}}, "at /properties/p.*document"),
        ({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}, "1001 properties"),
        ({"properties": {"p": {"x-guidance": {"lenient": True}}}}, "x-guidance"),
        ({"const": float("nan")}, "not JSON"),
        ({"const": "\udfff"}, "not JSON"),
        ({"const": {1, 2}}, "not JSON"),
        ({"enum": [f"value {i}" for i in range(100_000)]}, "bytes; at most"),
    ]
    for schema, words in not_tried:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            json_schema(schema, place="here")
        assert caught.value.param == "here"
        assert len(str(caught.value)) < 500


def test_notes_may_be_long_and_properties_may_have_their_names() -> None:
    notes = {"description": "x" * 9000, "examples": ["y" * 9000], "default": "z" * 9000}
    json_schema({"type": "object", **notes, "properties": {"description": {"type": "string"}}})
    with pytest.raises(InvalidRequestError, match="/properties/description/const"):
        json_schema({"properties": {"description": {"const": "x" * 5000}}})


def test_values_and_names_are_no_schemas() -> None:
    no_schemas: list[dict[str, object]] = [
        {"const": {"$ref": "x", "x-guidance": 1}},
        {"enum": [{"$ref": "x"}]},
        {"type": "object", "default": {"$ref": "x", "deep": ["y" * 9000]}},
        {"properties": {"x-guidance": {"type": "string"}, "$ref": {"type": "string"}}},
    ]
    for schema in no_schemas:
        json_schema(schema)


LARGE = 2**53

OTHER_NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"const": 1234567890123456789}, "at /const: 1234567890123456789 has more digits"),
    ({"const": 10**6000}, "at /const: a very large int"),
    ({"enum": [1, -LARGE - 1]}, "at /enum/1: -9007199254740993.*as a string"),
    ({"const": {"id": [LARGE + 1]}}, "at /const/id/0"),
    ({"enum": [[{"a": 123456789.12345679}]]}, "at /enum/0/0/a: 123456789.12345679"),
    ({"const": 0.30000000000000004}, "at /const"),
    ({"const": -91499.15742001859}, "at /const"),
    ({"const": 1.5e300}, "at /const"),
    ({"properties": {"a/b": {"minimum": LARGE + 1}}}, "at /properties/a~1b/minimum"),
    ({"maximum": 2**64}, "at /maximum"),
    ({"exclusiveMinimum": -(2**63)}, "at /exclusiveMinimum"),
    ({"exclusiveMaximum": 2**63}, "at /exclusiveMaximum"),
    ({"multipleOf": 10**17}, "at /multipleOf"),
]


def test_numbers_that_would_come_out_as_others_are_refused() -> None:
    for schema, words in OTHER_NUMBERS:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            json_schema(schema, place="here", strict=True)
        assert caught.value.param == "here"


NUMBERS = (0, -7, LARGE, -LARGE, 0.1, -2.5, 1.0, 1e20, 1e22, 1e-7, 123456789.123456, 9e15, True)


def test_other_numbers_come_out_as_themselves() -> None:
    for number in NUMBERS:
        text = json.dumps(number)
        for schema in ({"const": number}, {"enum": [number]}):
            assert matches(json_schema(schema), plain(text)), number
    for number in NUMBERS[:4]:
        bounds = {"type": "integer", "minimum": number, "maximum": number}
        assert matches(json_schema(bounds), str(number))
    json_schema({"maximum": 1.5e300, "default": 10**20, "maxLength": 2**60})


def test_the_ends_of_integer_types_are_kept_to() -> None:
    for last in (2**63 - 1, 2**64 - 1):
        spec = json_schema({"type": "integer", "minimum": 0, "maximum": last})
        assert matches(spec, "5")
    spec = json_schema({"type": "integer", "minimum": 0, "maximum": 2**63 - 1})
    assert matches(spec, str(2**63 - 1))
    assert not matches(spec, str(2**63))


def test_a_property_may_be_called_like_a_keyword() -> None:
    for name in ("enum", "const", "minimum"):
        json_schema({"properties": {name: {"type": "number", "default": 0.12345678901234568}}})
        with pytest.raises(InvalidRequestError, match=f"/properties/{name}/const"):
            json_schema({"properties": {name: {"const": LARGE + 1}}})


def plain(text: str) -> str:
    """Without a power of ten, as llguidance writes numbers."""
    return text if text == "true" else f"{Decimal(text).normalize():f}"
