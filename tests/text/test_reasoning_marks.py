"""Which marks stand around the reasoning, and around the answer after it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_data import load_tokenizer, pieces, tokenizer_with

from mlxinfer.outputs import Delta
from mlxinfer.text import ChatTemplate, ReasoningFormat, TextStream, detect_reasoning
from mlxinfer.text.reasoning import written_marks

TURNS = "{% for m in messages %}<|{{ m.role }}|>THOUGHT{{ m.content }}<|end|>{% endfor %}"
WRAPPED = ReasoningFormat(answer=("<response>", "</response>"))


def source(before: str, after: str) -> str:
    thought = before + "{{ m.reasoning_content }}" + after
    return TURNS.replace("THOUGHT", "{% if m.reasoning_content %}" + thought + "{% endif %}")


def template(before: str, after: str) -> ChatTemplate:
    return ChatTemplate(source(before, after))


def test_unknown_marks_are_read_off_the_template() -> None:
    unknown = [
        ("<thought>\n", "\n</thought>\n\n", ("<thought>", "</thought>")),
        ("<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")),
        ("[REASON]", "[/REASON]", ("[REASON]", "[/REASON]")),
        ("<a><b>", "</b></a>", ("<b>", "</b>")),
    ]
    for before, after, marks in unknown:
        assert written_marks(template(before, after)) == ReasoningFormat(*marks)


@pytest.mark.parametrize(
    ("before", "after"), [("Thought: ", "\n"), ("<thought>", "\n"), ("", ""), ("<|user|>", "<end>")]
)
def test_a_thought_between_plain_words_has_no_marks(before, after):
    assert written_marks(template(before, after)) is None


@pytest.mark.parametrize(
    "text", [TURNS.replace("THOUGHT", ""), "{{ raise_exception('no') }}{# thinking #}"]
)
def test_a_template_that_writes_no_thought_has_no_marks(text):
    assert written_marks(ChatTemplate(text)) is None


def test_known_marks_come_first():
    wrapped = source("<think>", "</think><response>") + "</response>"
    assert detect_reasoning(tokenizer_with(wrapped)) == replace(WRAPPED, implied=True)
    assert (
        detect_reasoning(tokenizer_with(TURNS.replace("THOUGHT", "<think></think>")))
        == ReasoningFormat()
    )


def split(text, cuts=(), prompt=()):
    tokenizer = load_tokenizer("bytelevel")
    stream = TextStream(tokenizer, reasoning=WRAPPED, prompt_ids=list(prompt))
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    parts = [part for piece in pieces(ids, list(cuts)) for part in stream.push(piece)]
    whole = Delta(parts=[*parts, *stream.finish()])
    return whole.reasoning, whole.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nhm\n</think>\n\n<response>\nHello <b>\n</response>\n", ("hm", "Hello <b>")),
        ("<response>Hello</response>", ("", "Hello")),
        ("<think>hm</think>Hello </response> there", ("hm", "Hello </response> there")),
        ("<think>hm</think><respon", ("hm", "<respon")),
        ("<think>hm</think><response>cut </respo", ("hm", "cut </respo")),
        ("<think>hm</think><response>a\n\n</response>\nb", ("hm", "a\nb")),
    ],
)
@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_marks_around_the_answer_are_dropped(text, expected, cuts):
    assert split(text, cuts) == expected
