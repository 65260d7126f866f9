"""Tools with schemas put together from others, and names that are no identifiers, in every
format: forced calls keep to them, and what was forced is read as the same call.
"""

import json
import time

import pytest
from test_tools_grammar import TOKENIZERS, allowed, every_format, written
from tool_samples import FORMATS, grammar_of

from mlxinfer.errors import InvalidRequestError
from mlxinfer.outputs import Delta
from mlxinfer.text import TextStream
from mlxinfer.text.tools import Toolbox, ToolParser
from mlxinfer.text.tools.cores import ParameterCore, PythonCore
from mlxinfer.text.tools.schema import flatten, resolve

# A schema reaches a format through its core: some formats of each core.
CORES = [
    "hermes", "llama", "mistral_named", "deepseek", "python_list", "lfm2", "qwen_xml", "glm",
    "minimax", "kimi_k3", "gemma4", "functiongemma", "harmony",
]  # fmt: skip
every_core = pytest.mark.parametrize("name", CORES)
OWN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WHOLE = {
    "a reference": {"$ref": "#/$defs/P", "$defs": {"P": OWN}},
    "a reference with escapes": {
        "$ref": "#/definitions/a~1b%3Cc%3E",
        "definitions": {"a/b<c>": OWN},
    },
    "all of two": {"type": "object", "allOf": [OWN, {"properties": {"b": {"type": "string"}}}]},
    "what others are": {
        "type": "object",
        "properties": {},
        "required": ["a"],
        "additionalProperties": {"type": "integer"},
    },
}


def box(parameters, name="f"):
    return Toolbox.of([{"name": name, "parameters": parameters}])


def forced(name, parameters, function="f"):
    return grammar_of("forced", TOKENIZERS["text"], FORMATS[name], box(parameters, function))


def text_of(name, arguments, function="f"):
    return written(name, [(function, arguments)])


def check(name, schema, *, right=(), wrong=()):
    """A forced call may have the arguments that are right for a schema, and no wrong ones."""
    grammar = forced(name, schema)
    for arguments in right:
        assert allowed("text", grammar, text_of(name, arguments)), (schema, arguments)
    for arguments in wrong:
        assert not allowed("text", grammar, text_of(name, arguments)), (schema, arguments)


@pytest.mark.alike
@every_core
def test_a_forced_call_keeps_to_the_whole_schema(name):
    for title, schema in WHOLE.items():
        check(name, schema, right=[{"a": 5}], wrong=[{}, {"a": "x"}])
        (tool,) = box(schema)
        assert tool.types_of("a") == {"integer"}, title


one_by_one = pytest.mark.parametrize(
    "name",
    [
        name
        for name in CORES
        if isinstance(getattr(FORMATS[name], "core", None), (ParameterCore, PythonCore))
        or name in ("gemma4", "functiongemma")
    ],
)
A, B = {"a": {"type": "integer"}}, {"b": {"type": "integer"}}
EITHER = {
    "of two objects": [{"properties": A, "required": ["a"]}, {"properties": B, "required": ["b"]}],
    "of two objects elsewhere": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
}


@one_by_one
@pytest.mark.parametrize(
    ("keyword", "options"), [*zip(("anyOf", "oneOf"), EITHER.values(), strict=True)], ids=EITHER
)
def test_a_forced_call_keeps_to_one_of_the_alternatives(name, keyword, options):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        keyword: options,
        "$defs": {
            "A": {"properties": A, "required": ["a"]},
            "B": {"properties": B, "required": ["b"]},
        },
    }
    right = [{"a": 5}, {"b": 7}, {"b": 7, "n": 1}]
    check(name, schema, right=right, wrong=[{}, {"n": 1}, {"a": "x"}])


@one_by_one
def test_alternatives_may_differ_in_what_they_require_or_in_one_type(name):
    schema = {
        "type": "object",
        "properties": {**A, **B},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}, {"type": "null"}],
    }
    check(name, schema, right=[{"a": 5}, {"b": 7}, {"a": 5, "b": 7}], wrong=[{}])
    kinds = [
        {"properties": {"k": {"const": kind}, "v": {"type": value}}, "required": ["k", "v"]}
        for kind, value in (("one", "integer"), ("many", "array"))
    ]
    right = [{"k": "one", "v": 5}, {"k": "many", "v": [5]}]
    check(name, {"type": "object", "anyOf": kinds}, right=right, wrong=[{"k": "many", "v": 5}])


@one_by_one
def test_alternatives_that_the_schema_refers_to_stay_allowed_inside(name):
    """One alternative is not the whole document that `#` refers to."""
    schema = {
        "type": "object",
        "anyOf": [
            {"properties": {"list": {"type": "array", "items": {"$ref": "#"}}}},
            {"properties": {**A}, "required": ["a"]},
        ],
    }
    check(name, schema, right=[{"list": [{"a": 5}]}])


@every_core
def test_a_parameter_may_refer_to_anything_in_the_tool(name):
    count = {"type": "integer", "minimum": 1, "maximum": 9}
    schema = {
        "type": "object",
        "properties": {"a": count, "b": {"$ref": "#/properties/a"}},
        "required": ["b"],
    }
    check(name, schema, right=[{"b": 5}], wrong=[{"b": 50}])


@every_core
@pytest.mark.parametrize(
    "schema", [{"$ref": "#/$defs/C"}, {"allOf": [{"$ref": "#/$defs/C"}], "default": "red"}]
)
def test_what_is_listed_elsewhere_is_kept_to(name, schema):
    """As libraries write an enumeration."""
    kinds = {"C": {"enum": ["red", "blue"], "type": "string"}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": kinds}
    check(name, parameters, right=[{"a": "blue"}], wrong=[{"a": "green"}])


@pytest.mark.parametrize("name", ["qwen_xml", "lfm2", "hermes", "glm"])
def test_a_tool_may_refer_to_itself(name):
    kids = {"type": "array", "items": {"$ref": "#"}}
    schema = {"type": "object", "properties": {"kids": kids}}
    check(name, schema, right=[{"kids": [{"kids": []}]}], wrong=[{"kids": [[]]}])


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "minimum": 50, "maximum": 55}, 52, 16408),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2], 1.5),
        ({"enum": [1, 2, "x"]}, 2, 3),
        ({"enum": [1, 2, "x"]}, "x", "y"),
        ({"type": ["integer", "null"]}, None, "x"),
        ({"type": "object"}, {"k": "v"}, []),
    ],
)
def test_gemma_keeps_to_types_and_bounds(name, schema, right, wrong):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    check(name, parameters, right=[{"a": right}], wrong=[{"a": wrong}])


@pytest.mark.alike
@every_format
@pytest.mark.parametrize(
    ("function", "key"), [("ns/tool", "user-id"), ("mcp:search", "x.y"), ("a.b-c", "$a@b:c")]
)
def test_what_is_forced_is_read_as_a_call(name, function, key):
    """Whatever tools and parameters are called."""
    schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    text = text_of(name, {key: "v"}, function)
    if name in ("gemma4", "functiongemma") and not key.isidentifier():
        quote = FORMATS[name].ends[1]
        text = text.replace(f"{{{key}:", f"{{{quote}{key}{quote}:")
    assert allowed("text", forced(name, schema, function), text), text
    if name == "harmony":
        return  # its calls are found among its channels, not in text
    tokenizer = TOKENIZERS["text"]
    stream = TextStream(tokenizer, tools=ToolParser(FORMATS[name], box(schema, function)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    result = Delta(parts=[*stream.push(ids), *stream.finish()]).tool_calls
    assert "".join(piece.name or "" for piece in result) == function
    assert json.loads("".join(piece.arguments for piece in result)) == {key: "v"}


def test_a_name_that_cannot_be_written_is_refused():
    schema = {"type": "object", "properties": {"a b": {"type": "string"}}}
    with pytest.raises(InvalidRequestError, match="'a b'"):
        forced("lfm2", schema)


def test_a_parameter_described_twice_keeps_both_schemas():
    parts = [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"minimum": 3}}}]
    assert flatten({"allOf": parts}).properties["a"] == {
        "allOf": [{"type": "integer"}, {"minimum": 3}]
    }
    flat = flatten({"anyOf": [{**part, "required": ["a"]} for part in parts]})
    assert flat.properties["a"] == {"anyOf": [{"type": "integer"}, {"minimum": 3}]}
    assert not flat.required


def test_references_in_a_schema_are_resolved():
    root = {"a": 1, "b": [2]}
    for reference, value in {
        **{"#": root, "#/a": 1, "#/b/0": 2, "#/b/1": None, "#/c": None, "x#/a": None}
    }.items():
        assert resolve(reference, root) == value, reference


def test_an_undeclared_required_parameter_can_be_forced():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
    for name in ("hermes", "qwen_xml"):
        check(name, schema, right=[{"a": 1, "b": "x"}])


def test_long_lists_of_alternatives_are_read_in_linear_time():
    long = {"anyOf": [1] * 50_000}
    parameters = {"type": "object", "properties": {"a": long}, **long}
    [tool] = Toolbox.of([{"name": "f", "parameters": parameters}])
    began_s = time.process_time()
    assert not tool.types_of("a")
    assert time.process_time() - began_s < 2
