"""Bad input: schemas, regular expressions and grammars that cannot, or must not, be compiled."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import CHAT, COMPLETIONS, MESSAGES, RESPONSES, expect_refusal, unharmed, with_fields
from live_server import LiveServer, chat

from mlxinfer.grammar import spec
from mlxinfer.grammar.compiler import CheckProcess


@pytest.fixture(scope="module", autouse=True)
def whole(live: LiveServer) -> Iterator[None]:
    yield from unharmed(live)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def ring(length: int) -> dict[str, Any]:
    """Definitions that are only each other."""
    defs = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % length}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": defs}


SCHEMAS: dict[str, Any] = {
    "no schema": 5,
    "a list": [{"type": "string"}],
    "false": False,
    "an unknown type": {"type": "text"},
    "types that are none": {"type": ["string", 1]},
    "two types at once": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "a range of nothing": {"type": "integer", "minimum": 5, "maximum": 1},
    "a length of nothing": {"type": "string", "minLength": 5, "maxLength": 1},
    "a choice of nothing": {"enum": []},
    "a property of nothing": {
        "type": "object",
        "properties": {"a": False},
        "required": ["a"],
        "additionalProperties": False,
    },
    "itself": {"$ref": "#"},
    "a ring": ring(2),
    "a long ring": ring(50),
    "another document": {"$ref": "https://evil.example/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "a relative document": {"$ref": "other.json#/x"},
    "a hole": {"$ref": "#/$defs/none"},
    "deep": nested(200),
    "a megabyte": {"enum": ["x" * 4000 + str(i) for i in range(270)]},
    "a long pattern": {"type": "string", "pattern": "a" * 5000},
    "a long name": {"type": "object", "properties": {"a" * 5000: {}}},
    "many properties": {"type": "object", "properties": {f"p{i}": {} for i in range(1001)}},
    "a pattern that is none": {"type": "string", "pattern": "("},
    "a pattern that looks ahead": {"type": "string", "pattern": "(?=x)y"},
    "a pattern that refers back": {"type": "string", "pattern": r"(a)\1"},
    "a negation": {"not": {"type": "string"}},
    "unique items": {"type": "array", "uniqueItems": True},
    "a condition": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "options that allow anything": {"x-guidance": {"lenient": True}, "type": "string"},
    "an option of another kind": {"x-guidance": {"item_separator": 1}, "type": "string"},
    "properties that are a list": {"type": "object", "properties": []},
    "required that is a text": {"type": "object", "required": "a"},
}


BEYOND_MASKS = (  # complete answers are checked for these, unless they are strict
    *("a pattern that looks ahead", "a pattern that refers back", "a negation"),
    *("unique items", "a condition"),
)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in BEYOND_MASKS])
def test_schemas(live: LiveServer, name: str) -> None:
    expect_refusal(live, CHAT, chat(guided_json=SCHEMAS[name]), param="guided_json")


@pytest.mark.parametrize("name", BEYOND_MASKS)
def test_strict_schemas(live: LiveServer, name: str) -> None:
    inner = {"name": "x", "schema": SCHEMAS[name], "strict": True}
    form = {"type": "json_schema", "json_schema": inner}
    param = "response_format.json_schema.schema"
    expect_refusal(live, CHAT, chat(response_format=form), param=param)


@pytest.mark.parametrize("name", ["a ring", "another document", "deep", "two types at once"])
def test_schemas_in_other_places(live: LiveServer, name: str) -> None:
    schema = SCHEMAS[name]
    form = {"type": "json_schema", "name": "x", "schema": schema}
    openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    expect_refusal(live, CHAT, chat(response_format=openai, stream=True))
    expect_refusal(live, COMPLETIONS, with_fields(COMPLETIONS, structured_outputs={"json": schema}))
    expect_refusal(live, RESPONSES, with_fields(RESPONSES, text={"format": form}))
    expect_refusal(live, MESSAGES, with_fields(MESSAGES, output_config={"format": form}))


FIELDS: list[tuple[str, Any]] = [
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": ["json_object"]}),
    ("response_format", {}),
    ("response_format", []),
    ("response_format", {"type": "json_schema", "json_schema": None}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": "{"}}),
    ("response_format", {"type": "structural_tag", "structures": []}),
    ("guided_json", "{"),
    ("guided_json", "null"),
    ("guided_json", "[" * 100_000),
    ("guided_regex", ""),
    ("guided_regex", 5),
    ("guided_regex", "("),
    ("guided_regex", "(?<=a)b"),
    ("guided_regex", r"(a)\1"),
    ("guided_regex", "[^\\s\\S]"),
    ("guided_regex", "a" * 4097),
    ("guided_regex", "(a{1000}){1000}"),
    ("guided_regex", "(?P<x"),
    ("guided_regex", "[z-a]"),
    ("guided_choice", []),
    ("guided_choice", "yes"),
    ("guided_choice", [""]),
    ("guided_choice", [1]),
    ("guided_choice", ["x" * 4097]),
    ("guided_choice", ["x"] * 10_001),
    ("guided_grammar", ""),
    ("guided_grammar", 5),
    ("guided_grammar", "start: ("),
    ("guided_grammar", "start: nothing"),
    ("guided_grammar", "start: start"),
    ("guided_grammar", "root ::= 'x'"),
    ("guided_grammar", '%import "/etc/passwd"\nstart: "x"'),
    ("guided_grammar", "start: <|no_such_token|>"),
    ("guided_grammar", "start: <[99999999]>"),
    ("guided_grammar", "x" * 65_537),
    ("guided_grammar", 'start: "a"\n' + "".join(f'r{i}: "b"\n' for i in range(7000))),
    ("structured_outputs", {"json": {}, "regex": "x"}),
    ("structured_outputs", {}),
    ("structured_outputs", {"tag": "x"}),
    ("structured_outputs", 5),
    ("grammar", "root ::= x"),
    ("ebnf", "root ::= x"),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=[f"{f}={v!r:.30}" for f, v in FIELDS])
def test_fields(live: LiveServer, field: str, value: Any) -> None:
    error = expect_refusal(live, CHAT, chat(**{field: value}))
    assert error["param"].startswith(field)


def test_a_grammar_that_ends_in_nothing_fails_alone(live: LiveServer) -> None:
    """Not to be seen beforehand: a form that cannot be finished within max_tokens is cut off."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}
    answer = live.post(CHAT, chat(guided_json=schema, max_tokens=5))
    assert answer.status_code in (200, 400)


def test_unknown_keywords_that_only_describe_are_taken(live: LiveServer) -> None:
    schema = {"type": "boolean", "title": "x" * 5000, "examples": [1], "$comment": "y"}
    answer = live.post(CHAT, chat(guided_json=schema))
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) in (True, False)


def test_grammars_compile_in_a_server_that_is_larger_than_their_limit() -> None:
    """The peak of the parent, which Linux hands down, is not the checking process's own."""
    limit = 300 << 20
    filled = bytearray(b"x") * limit  # touched, so that it counts
    checker = CheckProcess(max_bytes=limit)
    checker.check(spec.json_schema({"type": "string"}))
    checker.close()
    assert len(filled) == limit
