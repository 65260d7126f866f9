"""Schemas that stand by themselves: references are followed, or answers checked later."""

import json
from typing import Any

import pytest
from grammar_tools import compiler_of, matches

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar import spec
from mlxinfer.grammar.relaxed import problem_of
from mlxinfer.outputs import Result
from tests.tables import table

TABLES: Any = table(__file__, "references.yml")

STRING: Any = {"type": "string"}
ALIKE: dict[str, tuple[Any, Any, Any]] = TABLES["alike"]
LATER: dict[str, tuple[Any, Any, Any]] = TABLES["later"]


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
