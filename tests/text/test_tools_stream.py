"""Tool calls out of tokens: with reasoning, stop strings and characters cut in half."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_data import KINDS, load_tokenizer, pieces, tokenizer_with
from tool_samples import CONTROL, FORMATS, TOOLS, WRITERS, harmony

from mlxinfer.outputs import CallStatus, ReasoningPart, TextPart, ToolCallDelta, merged
from mlxinfer.text import ReasoningFormat, TextStream
from mlxinfer.text.tools import Toolbox, ToolParser

THINK = ReasoningFormat()
HARMONY = ReasoningFormat("", "", harmony=True)
BOX = Toolbox.of(TOOLS)
hermes = WRITERS["hermes"]
CALL = hermes([("get_weather", {"city": "Zürich 🙂"})])


def stream(tokenizer, name="hermes", **options):
    ids = (f"id{i}" for i in itertools.count())
    parser = ToolParser(FORMATS[name], BOX, new_id=lambda: next(ids))
    return TextStream(tokenizer, tools=parser, **options)


def run(one, ids, cuts=()):
    result = [part for piece in pieces(ids, list(cuts)) for part in one.push(piece)]
    return merged([*result, *one.finish()])


def answer(tokenizer, text, name="hermes", **options):
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return run(stream(tokenizer, name, **options), ids)


def done(name, arguments, index=0):
    return ToolCallDelta(
        index=index, id=f"id{index}", name=name, arguments=arguments, status=CallStatus.DONE
    )


WEATHER = done("get_weather", '{"city": "Zürich 🙂"}')


@pytest.fixture(scope="module")
def special():
    """A tokenizer in which every mark of every format is a control token, but fences of code."""
    return tokenizer_with(tokens=sorted({*CONTROL, *HARMONY.marks}))


def test_text_reasoning_and_calls_in_their_order():
    tokenizer = load_tokenizer("bytelevel")
    text = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\nAnd more."
    assert answer(tokenizer, text, reasoning=THINK) == (
        ReasoningPart("hm"),
        TextPart("I look."),
        WEATHER,
        TextPart("\nAnd more."),
    )


def test_a_call_within_the_reasoning_is_none():
    tokenizer = load_tokenizer("bytelevel")
    text = f"<think>I could write {CALL}.</think>{CALL}"
    reasoning, call = answer(tokenizer, text, reasoning=THINK)
    assert reasoning == ReasoningPart(f"I could write {CALL}.")
    assert call == WEATHER


def test_marks_that_are_control_tokens(special):
    for name, writer in WRITERS.items():
        parts = answer(special, writer([("now", {})]), name)
        assert [part.arguments for part in parts] == ["{}"], name


@pytest.mark.parametrize("kind", KINDS)
@given(
    bits=st.lists(
        st.sampled_from([CALL, CALL[:40], "<think>", "</think>", "é", "🙂", " ", "ST", "OP", "a"]),
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
    reasoning=st.sampled_from([None, THINK]),
    single=st.booleans(),
)
def test_parts_do_not_depend_on_the_pieces(kind, bits, cuts, reasoning, single):
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode("".join(bits), add_special_tokens=False, parse_special=True)
    options = {"reasoning": reasoning, "single_call": single, "stop": ["STOP"]}
    one, two = stream(tokenizer, **options), stream(tokenizer, **options)
    assert run(one, ids) == run(two, ids, cuts)
    assert (one.stopped, one.stop_match, one.num_tokens) == (
        *(two.stopped, two.stop_match),
        two.num_tokens,
    )


def test_stop_strings_are_looked_for_in_text_only(tokenizer):
    text = f"{hermes([('get_weather', {'city': 'STOP'})])} then STOP here"
    call, rest = answer(tokenizer, text, stop=["STOP"])
    assert call.arguments == '{"city": "STOP"}'
    assert rest.text.strip() == "then"


def test_a_stop_string_does_not_reach_across_a_call(tokenizer):
    text = f"a ST{hermes([('now', {})])}OP b"
    parts = answer(tokenizer, text, stop=["STOP"])
    assert [type(part) for part in parts] == [TextPart, ToolCallDelta, TextPart]
    assert parts[0].text == "a ST"
    assert parts[2].text.replace(" ", "") == "OPb"


def test_a_single_call_ends_the_answer(tokenizer):
    text = "\n".join([CALL, CALL]) + " more"
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    one = stream(tokenizer, single_call=True)
    assert run(one, ids) == (WEATHER,)
    assert one.stopped
    assert one.stop_match is None
    assert one.num_tokens < len(ids)


def test_harmony_messages_to_tools(special):
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|>" + harmony([("get_weather", {"city": "Zürich 🙂"})])
    )
    shown = answer(special, text, "harmony", reasoning=HARMONY)
    assert shown == (ReasoningPart("hm"), TextPart("I look."), WEATHER)


def test_harmony_continues_the_header_in_the_prompt(special):
    prompt = special.encode("<|start|>assistant", parse_special=True)
    text = harmony([("now", {})]).removeprefix("<|start|>assistant")
    shown = answer(special, text, "harmony", reasoning=HARMONY, prompt_ids=prompt)
    assert shown == (done("now", "{}"),)


def test_a_truncated_call_is_a_call_alone(special):
    text = "<tool_call>\n" + '{"name": "get_weather", "arguments": {"city": "Zü'
    (cut,) = answer(special, text)
    assert (cut.name, cut.arguments) == ("get_weather", '{"city": "Zü')
    assert cut.status is CallStatus.CUT
