"""Schemas beyond llguidance: the part that masks hold, and the check of complete answers."""

import json
from typing import Any

import pytest
from grammar_tools import compiler_of, matches

from mlxinfer import LLM, SamplingParams
from mlxinfer.errors import GrammarFailedError, InvalidRequestError
from mlxinfer.grammar import spec
from mlxinfer.grammar.relaxed import any_of, problem_of
from mlxinfer.outputs import Result, ToolCall

BITS: Any = {"enum": [0, 1]}
PAIR: Any = {"type": "array", "items": BITS, "minItems": 2, "maxItems": 2}
AGES: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
HOST = r"^[A-Za-z0-9\-]+(\.[A-Za-z0-9\-]+)+$"
CASES: list[tuple[str, Any, Any, Any]] = [  # keyword, schema, a value of it, a value that is none
    ("uniqueItems", {**PAIR, "uniqueItems": True}, [0, 1], [0, 0]),
    ("contains", {**PAIR, "contains": {"const": 1}}, [0, 1], [0, 0]),
    ("minContains", {**PAIR, "contains": {"const": 1}, "minContains": 2}, [1, 1], [0, 1]),
    ("not", {"type": "string", "maxLength": 1, "not": {"const": "a"}}, "b", "a"),
    (
        "if",
        {**AGES, "if": {"properties": {"a": {"minimum": 3}}}, "then": {"required": ["b"]}},
        {"a": 1},
        {"a": 5},
    ),
    ("propertyNames", {**AGES, "propertyNames": {"maxLength": 1}}, {"a": 1}, {"long": 1}),
    ("pattern", {"type": "string", "pattern": "^(?!ab)"}, "ba", "ab"),
    ("pattern", {"type": "string", "pattern": r"^\w\b.?$", "maxLength": 2}, "a-", "ab"),
    ("maxLength", {"type": "string", "pattern": HOST, "maxLength": 155}, "a.b", "a." * 80 + "b"),
    (
        "unevaluatedProperties",
        {"type": "object", "anyOf": [AGES], "unevaluatedProperties": False},
        {"a": 1},
        {"c": 1},
    ),
]


def written(value: Any) -> Result:
    return Result(text=json.dumps(value))


@pytest.mark.parametrize(("keyword", "schema", "good", "bad"), CASES, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("inside", [False, True])
def test_what_masks_cannot_hold_is_checked(
    keyword: str, schema: Any, good: Any, bad: Any, inside: bool
) -> None:
    if inside:
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        good, bad = {"x": good}, {"x": bad}
    before = json.dumps(schema)
    grammar = spec.json_schema(schema)
    assert json.dumps(schema) == before
    (part,) = grammar.unenforced
    assert keyword in part.keywords
    assert matches(grammar, json.dumps(good))
    assert problem_of(grammar.unenforced, written(good)) is None
    place, problem = problem_of(grammar.unenforced, written(bad)) or ("", "")
    assert place == "json_schema.schema"
    assert ("/x" in problem) is inside
    with pytest.raises(InvalidRequestError):
        compiler_of().start(spec.json_schema(schema, strict=True))


CAT: Any = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG: Any = {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]}

MAY_BE_CHECKED: list[tuple[Any, bool]] = [
    (AGES, False),
    (PAIR, False),
    ({"properties": {"uniqueItems": BITS}}, False),
    ({"oneOf": [CAT, DOG]}, False),
    ({"oneOf": [{"$ref": "#/$defs/c"}, DOG], "$defs": {"c": CAT}}, False),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, False),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, True),
    ({"oneOf": [CAT, DOG, CAT]}, True),
    ({"oneOf": [CAT, {"type": "object"}]}, True),
    ({"oneOf": [CAT, {"type": "object"}], "x-guidance": {"coerce_one_of": True}}, False),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, True),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1}, False),
    ({"type": "object", "patternProperties": {"^a": BITS, "^b": AGES}}, False),
    ({"type": "object", "patternProperties": {"a": BITS, "^b": AGES}}, True),
    ({"$schema": "https://json-schema.org/draft-07/schema", "type": "string"}, False),
    ({"type": "string", "maxLength": 2.0}, False),
]


def test_only_what_masks_cannot_hold_is_checked() -> None:
    for schema, checked in MAY_BE_CHECKED:
        grammar = spec.json_schema(schema)
        assert bool(grammar.unenforced) is checked
        compiler_of().start(grammar)


def test_patterns_of_other_languages_are_read() -> None:
    patterns = [
        (r"^[a-c]\Z", "b", "b\n"),  # Python's
        (r"^[\uE000-\uFFFD\uD800\uDBFF-\uDC00\uDFFF]$", "\U0001f600", "a"),  # Java's
        ("^{a}$", "{a}", "a"),
        ("^[]{]}]$", "]}]", "]"),  # a class of two, and two signs
        ("^(?i)a(b|c$)", "AC", "d"),
        (r"^\[x]$", "[x]", "x"),
        (r"^[^?{}()[\]]+$", "ab", "a["),
    ]
    for pattern, good, bad in patterns:
        schema = {"type": "array", "items": {"type": "string", "pattern": pattern}, "maxItems": 2}
        for grammar in (
            spec.json_schema(schema),
            spec.json_schema({**schema, "uniqueItems": True}),
        ):
            assert matches(grammar, json.dumps([good], ensure_ascii=False))
            assert not matches(grammar, json.dumps([bad]))
            assert problem_of(grammar.unenforced, written([good])) is None


def test_a_schema_that_no_answer_can_be_checked_against_is_refused() -> None:
    """Else each answer would be made, and then be called wrong."""
    with pytest.raises(InvalidRequestError, match=r"at /items/type: this is no JSON schema"):
        spec.json_schema({"uniqueItems": True, "items": {"type": ["string", "intrinsic"]}})
    old = {"items": {"$ref": "http://json-schema.org/draft-04/schema#"}, "uniqueItems": True}
    assert problem_of(spec.json_schema(old).unenforced, written([{"type": "string"}])) is None


def test_a_value_of_two_options_is_none_of_a_one_of() -> None:
    grammar = spec.json_schema({"oneOf": [{"maximum": 5}, {"minimum": 3}], "type": "integer"})
    assert matches(grammar, "4")
    assert problem_of(grammar.unenforced, written(4)) is not None
    assert problem_of(grammar.unenforced, written(7)) is None


def test_a_reference_into_a_one_of_is_followed_where_that_is_an_any_of() -> None:
    """A tool's arguments may match several options; the check follows the same references."""
    schema = {
        "properties": {"a": {"oneOf": [BITS, PAIR]}, "b": {"$ref": "#/properties/a/oneOf/1"}},
        "uniqueItems": True,
    }
    enforced, unenforced = spec.enforceable(any_of(schema), place="tools[0]")
    assert matches(spec.json_schema(enforced), '{"b": [0, 1]}')
    assert problem_of(unenforced, written({"a": 1, "b": [0, 1]})) is None
    assert problem_of(unenforced, written({"b": [0, 2]})) is not None


def test_calls_are_checked_by_their_tool() -> None:
    tool = spec.enforceable({**PAIR, "uniqueItems": True}, place="tools[0]", tool="f")[1]
    for name, arguments, fits in (("f", [0, 1], True), ("f", [0, 0], False), ("g", [0, 0], True)):
        call = ToolCall(id="c", name=name, arguments=json.dumps(arguments))
        result = Result(text="and text", tool_calls=(call,))
        assert (problem_of(tool, result) is None) is fits


def test_no_document_is_fetched_and_no_pattern_hangs() -> None:
    evil = {"type": "string", "pattern": "^(?=a)(a+)+$"}
    parts = spec.json_schema(evil).unenforced
    assert problem_of(parts, written("a" * 40 + "!")) is not None
    remote = {"not": {"$ref": "http://127.0.0.1:9/schema.json"}}
    with pytest.raises(InvalidRequestError):
        spec.json_schema(remote)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("demo-draft") as made:
        yield made


def form(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def test_an_answer_that_breaks_the_schema_is_tried_again(llm: LLM) -> None:
    schema = {**PAIR, "not": {"enum": [[0, 0], [1, 1]]}}
    attempts = []
    for seed in (7, 8, 9):
        params = SamplingParams(seed=seed, temperature=3.0, logprobs=0)
        result = llm.generate("Two bits: ", params, response_format=form(schema))
        assert sorted(json.loads(result.text)) == [0, 1], f"seed {seed}"
        assert len(result.logprobs or ()) == len(result.token_ids)
        parts = list(llm.stream("Two bits: ", params, response_format=form(schema)))
        assert "".join(part.text for part in parts) == result.text, "a seed gives the same attempts"
        assert parts[-1].result.num_attempts == result.num_attempts
        attempts.append(result.num_attempts)
    assert max(attempts) > 1 == min(attempts), attempts


def test_a_schema_that_nothing_satisfies_fails_after_a_few_attempts(llm: LLM) -> None:
    with pytest.raises(GrammarFailedError, match="6 answers did not fit the schema"):
        llm.generate("Bits: ", response_format=form({**PAIR, "contains": {"const": 7}}))
    assert llm.generate("Bits: ").text, "the engine goes on"
