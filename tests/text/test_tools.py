"""Every format: what it writes is read back, whatever pieces it comes in, and nothing is lost."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.runs import every
from text_data import pieces
from tool_samples import FORMATS, TOOLS, WRITERS

from mlxinfer.outputs import CallStatus, TextPart, ToolCallDelta, merged
from mlxinfer.text.tools import Toolbox, ToolParser
from mlxinfer.text.tools.cores import NamedCore
from mlxinfer.text.tools.template_format import CallSyntax, TemplateFormat

BOX = Toolbox.of(TOOLS)
few = settings(max_examples=settings.default.max_examples // 3)  # of each of many formats
every_writer = pytest.mark.parametrize(("name", "writer"), WRITERS.items(), ids=WRITERS)


def parse(name, parts):
    ids = (f"id{i}" for i in itertools.count())
    parser = ToolParser(FORMATS[name], BOX, new_id=lambda: next(ids))
    result = [part for text in parts for part in parser.push(text)]
    return merged([*result, *parser.finish()])


def calls_of(parts):
    done = [p for p in parts if isinstance(p, ToolCallDelta) and p.status is CallStatus.DONE]
    return [(call.name, json.loads(call.arguments)) for call in done]


def text_of(parts):
    return "".join(part.text for part in parts if isinstance(part, TextPart))


CUT = CallStatus.CUT
TWO = [("get_weather", {"city": 'Par"is\n<é🙂', "days": 3}), ("now", {})]


@every_writer
def test_text_around_calls_is_kept(name, writer):
    marked = FORMATS[name].begins and not writer(TWO).startswith(("[get", "{"))
    before = "Let me look.\n" if marked else ""
    parts = parse(name, [before + writer(TWO) + "\nDone. "])
    assert calls_of(parts) == TWO
    assert text_of(parts) == before.strip() + "\nDone. "
    assert isinstance(parts[-1], TextPart)
    calls = [(part.index, part.id) for part in parts if isinstance(part, ToolCallDelta)]
    assert calls == [(0, "id0"), (1, "id1")]


strings = st.text(st.sampled_from("ab\"'\\\n\t é🙂{}[],:"), max_size=6)
values = st.recursive(
    strings | st.integers(-999, 999) | st.booleans() | st.sampled_from([0.5, -2.25]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(strings, inner, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {"city": strings},
    optional={
        "days": st.integers(-99, 99),
        "detail": st.dictionaries(strings, values, max_size=3),
        "units": st.sampled_from(["C", "F"]),
    },
)
some_calls = st.lists(
    st.tuples(st.just("get_weather"), arguments) | st.just(("now", {})), min_size=1, max_size=3
)
cut_places = st.lists(st.integers(0, 1000), max_size=8)


@pytest.mark.alike
@every_writer
@few
@given(calls=some_calls, cuts=cut_places)
def test_any_call_in_any_pieces(name, writer, calls, cuts):
    text = writer(calls)
    whole = parse(name, [text])
    assert calls_of(whole) == calls
    assert parse(name, ["".join(p) for p in pieces(list(text), cuts)]) == whole
    assert parse(name, list(text)) == whole


def fragments(name):
    """Pieces of a format, and what else may come."""
    known = FORMATS[name]
    sample = [writer(TWO) for other, writer in WRITERS.items() if other == name]
    bits = [*known.marks, *known.bare, *sample, "get_weather", "call:", "name", '{"name": "now"']
    return st.sampled_from(
        [*bits, '"arguments": {', "{}", "}", "]", "(", ")", "=", ",", '"', "\n", " ", "é", "a", "<"]
    )


@pytest.mark.alike
@pytest.mark.parametrize("name", FORMATS)
@few
@given(data=st.data(), cuts=cut_places)
def test_whatever_comes_nothing_is_lost(name, data, cuts):
    text = data.draw(st.lists(fragments(name), max_size=10).map("".join))
    whole = parse(name, [text])
    assert parse(name, ["".join(p) for p in pieces(list(text), cuts)]) == whole
    assert parse(name, list(text)) == whole
    for part in whole:
        if isinstance(part, ToolCallDelta) and part.status is CallStatus.DONE:
            assert isinstance(json.loads(part.arguments), dict)
    cut = [p for p in whole if isinstance(p, ToolCallDelta) and p.status is CallStatus.CUT]
    if not calls_of(whole) and not cut:
        assert text_of(whole) == text
    assert all(p.status is not CallStatus.OPEN for p in whole if isinstance(p, ToolCallDelta))


@every_writer
def test_a_call_that_is_cut_off_anywhere_is_either_text_or_a_call(name, writer):
    text = writer(TWO[:1])
    (whole,) = parse(name, [text])
    for end in range(1, len(text)):
        parts = parse(name, [text[:end]])
        calls = [part for part in parts if isinstance(part, ToolCallDelta)]
        if calls:
            (call,) = parts
            assert (call.name, call.status) in {(whole.name, s) for s in (CUT, whole.status)}
            assert whole.arguments.startswith(call.arguments)
        else:
            assert text_of(parts) == text[:end]


@every_writer
def test_where_a_call_is_forced_its_beginning_is_no_text(name, writer):
    text = writer(TWO[:1]).lstrip()
    for end in range(1, text.index("city")):
        for arriving in ([text[:end]], list(text[:end])):
            parser = ToolParser(FORMATS[name], BOX, must_call=True)
            parts = [part for piece in arriving for part in parser.push(piece)]
            assert text_of([*parts, *parser.finish()]) == "", text[:end]


def test_a_broken_call_is_marked_and_comes_as_text():
    text = '<tool_call>{"name": "now", "arguments": {"a": 1, oops}}</tool_call>'
    parts = parse("hermes", [text])
    assert parts == (
        ToolCallDelta(
            index=0, id="id0", name="now", arguments='{"a": 1, ', status=CallStatus.BROKEN
        ),
        TextPart(text),
    )
    again = parse("hermes", [text + '<tool_call>{"name": "now"}</tool_call>'])
    assert calls_of(again) == [("now", {})]
    assert again[-1].index == 1


def test_what_is_no_call_is_text() -> None:
    no_calls = [
        ("llama", '{"name": "Grace", "age": 47}'),
        ("llama", '{"name": "Grace", "parameters": {"age": 47}}'),
        ("llama", "[1, 2, 3]"),
        ("llama", 'An answer, then {"name": "now", "parameters": {}}'),
        ("python_list", "[f(x), g(y)]"),
        ("python_list", "[now(1)]"),
        ("python_list", "[link](https://example.org)"),
        ("hermes", "use <tool_call> and </tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>["now"]</tool_call>'),
        ("harmony", "<|start|>assistant<|channel|>commentary to=python<|message|>print(1)<|call|>"),
        ("qwen_xml", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ]
    for name, text in no_calls:
        parts = parse(name, [text])
        assert calls_of(parts) == []
        assert text_of(parts) == text


def test_a_call_of_an_unknown_tool_is_a_call_where_it_is_marked():
    assert calls_of(parse("hermes", ['<tool_call>{"name": "other"}</tool_call>'])) == [
        ("other", {})
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "arguments": null}',
        '{"name": "now", "arguments": ""}',
        '{"name": "now", "arguments": "{}"}',
        '{"name": "now"}',
        '{"arguments": {}, "name": "now"}',
        '{"id": [1, {"name": "no"}], "type": "function", "name": "now", "parameters": {}}',
        '{"type": "function", "function": {"name": "now", "arguments": {}}}',
        '{"function": "now", "arguments": {}}',
    ],
)
def test_all_json_spellings_of_a_call_are_read(text):
    assert calls_of(parse("hermes", [f"<tool_call>{text}</tool_call>"])) == [("now", {})]


def test_arguments_come_while_they_are_written():
    parser = ToolParser(FORMATS["qwen_xml"], BOX)
    assert parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")[0].name
    assert parser.push("New ")[0].arguments == "New "
    assert parser.push("York\n")[0].arguments == "York"
    assert parser.push("!")[0].arguments == "\\n!"


def test_ids_fit_their_conversations():
    result = {FORMATS["hermes"].new_id() for _ in range(50)}
    assert len(result) == 50
    assert all(one.startswith("call_") for one in result)
    short = TemplateFormat(
        CallSyntax(("", ""), ("[TOOL_CALLS]", "")), NamedCore(""), short_ids=True
    )
    assert all(len(i) == 9 and i.isalnum() for i in [short.new_id()] * 9)


@pytest.mark.alike
@pytest.mark.parametrize("name", every(4, FORMATS))
def test_an_endless_repetition_is_linear(name):
    hostile = [
        "<", " ", "\n", "[", "{", "a", '"', "\\", "call:", "<tool_call>", "[TOOL_CALLS]", "((",
    ]  # fmt: skip
    known = FORMATS[name]
    began = time.process_time()
    for unit in [*hostile, *known.begins, (*known.begins, *known.bare)[0] + "x"]:
        parser = ToolParser(known, BOX)
        parser.push((*known.begins, "")[0] + '{"name": "now", "arguments": {"a": "')
        for _ in range(1_500):
            parser.push(unit)
        parser.finish()
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize("name", ["hermes", "lfm2", "gemma4"])
def test_endless_nesting_is_text(name):
    heads = {
        "hermes": '<tool_call>{"name": "now", "arguments": {"a": ',
        "lfm2": "<|tool_call_start|>[now(a=",
        "gemma4": "<|tool_call>call:now{a:",
    }
    for opening in ("[", '{"a": ', "(", "{'a': ", "{a:"):
        text = heads[name] + opening * 2_500
        parts = parse(name, [text])
        assert calls_of(parts) == [], opening
        assert text_of(parts) == text
