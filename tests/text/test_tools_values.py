"""Values of arguments: JSON, Python literals and bare words, against json and ast."""

import ast
import json
import time
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import InvalidRequestError
from mlxinfer.text.reader import Malformed, TextReader
from mlxinfer.text.tools.schema import Toolbox, json_of
from mlxinfer.text.tools.values import copy_value, python_to_json

json_text = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
).map(json.dumps)
marks = st.text(st.sampled_from('{}[]",:\\u0019eE.+- \ntrufalsn'), max_size=12)


def read_json(text):
    """The value that was passed on, and what was left over; None where it is no JSON."""
    reader = TextReader.of(text)
    pieces = []
    try:
        next(copy_value(reader, pieces.append), None)
    except Malformed:
        return None
    rest = text[len(reader.commit()) :]
    return json.loads("".join(pieces)), rest


@given(json_text)
def test_json_is_passed_on_as_it_is(text):
    assert read_json(text + " rest") == (json.loads(text), " rest")


@given(json_text | marks)
def test_what_json_refuses_is_refused(text):
    try:
        value = json.loads(text.strip(), strict=False, parse_constant=ast.literal_eval)
    except ValueError:
        parsed = read_json(text.strip())
        assert parsed is None or parsed[1]
    else:
        assert read_json(text.strip()) == (value, "")


def test_line_breaks_within_strings_are_mended():
    assert read_json('{"a\n": "b\tc"}') == ({"a\n": "b\tc"}, "")


def test_what_is_no_json_is_refused():
    for text in ("NaN", "Infinity", "True", "'a'", "01", "1.", ".5", "+1", "", "[1,]"):
        assert read_json(text) is None, text


python_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(python_value)
def test_python_literals_become_the_json_of_their_values(value):
    assert json.loads(python_to_json(repr(value))) == json.loads(json.dumps(value))


def test_surrogates_in_a_python_literal():
    for quote in ("'", '"', "'''"):
        literal = rf"{quote}a\ud83d\ude00\u00e9{quote}"
        assert json.loads(python_to_json(literal)) == "a\U0001f600é"
    for half in (r"\ud83d", r"\ude00", r"\ud83dx", r"\ud83d\n", r"\ud83d\ud83d\ude00"):
        assert "\ufffd" in json.loads(python_to_json(f"'{half}'")), half


BITS = r"""' " \ n x41 \u00e9 \0 [ ] { } ( ) , : 1 0x1f 1_0 1e3 - .5 True null None é f"""
pythonic = st.sampled_from([*BITS.split(), " ", "\n", "'''", '"' * 3])


@given(st.lists(pythonic, max_size=7).map("".join))
def test_what_is_read_as_python_is_what_python_reads(text):
    rewritten = python_to_json(text)
    if rewritten is None or "null" in text or "true" in text:
        return
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return  # 007, raw line breaks within a string: tolerated
    if json.dumps(value) != json.dumps(json.loads(rewritten)):
        assert isinstance(value, dict)
        assert len(value) < len(rewritten)  # keys that are no strings, or twice


def test_what_is_no_literal_is_refused():
    for text in ("f(1)", "a.b", "1 + 1", "[1", "{1, 2}", "x", "1e999", ""):
        assert python_to_json(text) is None, text


def test_unquoted_values_get_the_type_of_the_schema() -> None:
    unquoted = [
        ("5", {"string"}, "5"), ("5", {"integer"}, 5), ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"), ("5.5", {"number"}, 5.5), ("1e3", {"number"}, 1000.0),
        ("nan", {"number"}, "nan"), ("True", {"boolean"}, True), ("yes", {"boolean"}, "yes"),
        ("null", {"string", "null"}, None), ("null", {"string"}, "null"),
        ("null", {"integer"}, None), ("None", {"null", "integer"}, None),
        ("7", {"string", "integer"}, 7), ("x", {"string", "integer"}, "x"),
        ('{"a": 1}', {"object"}, {"a": 1}), ("{'a': True}", {"object"}, {"a": True}),
        ("[1, 2", {"array"}, "[1, 2"), ('"quoted"', {"string"}, '"quoted"'), ("[1]", set(), [1]),
        ("12", set(), 12), ("a b", set(), "a b"), ("NaN", set(), "NaN"),
        ("9" * 500, {"integer"}, "9" * 500),
    ]  # fmt: skip
    for text, types, expected in unquoted:
        assert json.loads(json_of(text, frozenset(types))) == expected


def tool(parameters):
    return Toolbox.of([{"name": "f", "parameters": parameters}]).get("f")


TYPES = [
    ({"type": "string"}, {"string"}), ({"type": ["string", "null"]}, {"string", "null"}),
    ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/name"}]}, {"integer", "string"}),
    ({"enum": ["a", 1, None]}, {"string", "integer", "null"}), ({"const": True}, {"boolean"}),
    ({"$ref": "#/$defs/loop"}, set()), ({"$ref": "elsewhere"}, set()), ({}, set()), (True, set()),
]  # fmt: skip


def test_types_of_a_schema() -> None:
    for schema, types in TYPES:
        definitions = {"name": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
        result = tool({"properties": {"p": schema}, "$defs": definitions})
        assert result.types_of("p") == types
        assert result.types_of("other") == set()


def test_a_schema_that_refers_to_itself_many_times():
    root = {"properties": {"p": {"$ref": "#"}}, "anyOf": [{"$ref": "#"}] * 50}
    began = time.process_time()
    assert tool(root).types_of("p") == {"object"}
    assert time.process_time() - began < 1


def test_wrong_tools_are_refused() -> None:
    no_tools = [
        ["f"], [{"type": "web_search"}], [{"type": "function", "function": {}}],
        [{"type": "function", "function": "f"}], [{"name": "f g"}], [{"name": ""}],
        [{"name": "f", "parameters": []}], [{"name": "f"}, {"name": "f"}],
    ]  # fmt: skip
    for tools in no_tools:
        with pytest.raises(InvalidRequestError):
            Toolbox.of(tools)


def test_what_nothing_can_encode_is_mended() -> None:
    mended = [
        (r'"\ud83d"', "\ufffd"), (r'"\ude00"', "\ufffd"), (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\ud83d\ud83d\ude00!"', "\ufffd\U0001f600!"), (r'"\ud83d\n"', "\ufffd\n"),
        (r'"\ud83dx\u00e9"', "\ufffdx\u00e9"), ("1e999", "1e999"), ("-1e999", "-1e999"),
    ]  # fmt: skip
    for text, said in mended:
        assert read_json(text) == (said, "")
        assert json.loads(json_of(text, frozenset())) == said
        listed = json.loads(json_of(f"[{text}]", frozenset({"array"})))
        assert listed == ([said] if text.startswith('"') else f"[{text}]"), (
            "a number cannot be mended"
        )


@given(st.text(st.sampled_from(r'\ud83e0"[]{}:,1e9nIafinty-'), max_size=24))
def test_arguments_are_what_strict_readers_read(text):
    for types in (frozenset(), frozenset({"array", "object"}), frozenset({"number", "string"})):
        msgspec.json.decode(json_of(text, types).encode())
    for value in (f'"{text}', f"[{text}"):
        reader, pieces = TextReader.of(value), []
        with suppress(Malformed):
            next(copy_value(reader, pieces.append), None)
            msgspec.json.decode("".join(pieces).encode())
