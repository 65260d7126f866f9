"""The part of an answer in the prompt: tags of the template, continued messages, user text."""

import time

import pytest
from text_data import DATA, load_tokenizer, read_template, tokenizer_with

from mlxinfer.outputs import Delta
from mlxinfer.text import ChatTemplate, ReasoningFormat, TextStream, Tokenizer, encode_chat
from mlxinfer.text.reasoning import answer_begun

THINK = ReasoningFormat()
TYPED = ReasoningFormat("<reason>", "</reason>")  # no tokens of the tokenizer
HARMONY = ReasoningFormat("", "", harmony=True)
ASKED = "<|im_start|>user\nWhat is {start}?<|im_end|>\n<|im_start|>assistant\n"
PAST = "<|im_start|>assistant\n{start}a<|im_end|>\n<|im_start|>assistant\n"
LONG = "so far " * 80


def prefix_of(tokenizer, reasoning, prompt):
    ids = tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)
    return answer_begun(tokenizer, reasoning, ids)[1]


@pytest.fixture(scope="module")
def harmony():
    return tokenizer_with(read_template("channels"), HARMONY.marks)


def test_a_tag_from_user_text_opens_no_reasoning_without_turn_tokens():
    tokenizer = Tokenizer.from_folder(DATA / "bytelevel")
    tokenizer.template = ChatTemplate(
        "{% for m in messages %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% endfor %}",
        variables={"bos_token": "<s>"},
    )
    ids = encode_chat(tokenizer, [{"role": "user", "content": "What is <think>?"}] * 2)
    assert answer_begun(tokenizer, THINK, ids)[1] == ""
    tokenizer.template = ChatTemplate("<s>[INST] {{ messages[0].content }} [/INST]")
    ids = encode_chat(tokenizer, [{"role": "user", "content": "What is <think>?"}])
    assert answer_begun(tokenizer, THINK, ids)[1] == ""


@pytest.mark.parametrize("reasoning", [THINK, TYPED], ids=["tokens", "text"])
@pytest.mark.parametrize("before", ["", ASKED, PAST], ids=["plain", "asked", "past"])
def test_a_thought_is_open_until_its_end_tag(reasoning, before) -> None:
    endings = [
        ("{start}\n", "{start}\n"), ("{start}{stop}{start}", "{start}"), ("{start}a{stop}b", None),
        ("{start}\n\n{stop}\n\n", None), ("{stop}", ""), ("Hello", ""),
    ]  # fmt: skip
    for end, thought in endings:
        tags = {"start": reasoning.start, "stop": reasoning.end}
        prompt = (before + end).format(**tags)
        result = prefix_of(load_tokenizer("bytelevel"), reasoning, prompt)
        if thought is None:
            assert not reasoning.is_open(result), end
        else:
            assert not reasoning.is_closed(result), end
            assert result.strip() == thought.format(**tags).strip(), end


@pytest.mark.parametrize("reasoning", [THINK, TYPED], ids=["tokens", "text"])
@pytest.mark.parametrize("thought", ["\nOkay, the user", LONG], ids=["short", "long"])
def test_a_thought_is_continued(reasoning, thought):
    prompt = f"{ASKED}{{start}}{thought}".format(start=reasoning.start)
    result = prefix_of(load_tokenizer("bytelevel"), reasoning, prompt)
    assert result == reasoning.start + thought


def test_without_turns_a_tag_in_the_text_opens_nothing():
    """Without turn tokens a tag counts if it is a token of its own, or stands at the end."""
    tokenizer = load_tokenizer("bytelevel")
    assert prefix_of(tokenizer, TYPED, "[INST] What is <reason>? [/INST]") == ""
    assert prefix_of(tokenizer, TYPED, "<s>[INST] What is <reason>? [/INST]") == ""
    assert prefix_of(tokenizer, TYPED, "a<|im_end|>\nUser: What is <reason>?") == ""
    assert prefix_of(tokenizer, TYPED, "Q\n<reason>\n") == "<reason>"
    assert prefix_of(tokenizer, THINK, "Q\n<think>\nOkay") == "<think>\nOkay"


def test_user_text_opens_no_reasoning():
    tokenizer = load_tokenizer("bytelevel", "chatml_plain")
    typed = [{"role": "user", "content": "go <think> on"}]
    assert answer_begun(tokenizer, THINK, encode_chat(tokenizer, typed))[1] == ""
    final = {"role": "assistant", "content": "<think>\nOkay"}
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    ids = encode_chat(tokenizer, [*typed, final], **goes_on)
    assert answer_begun(tokenizer, THINK, ids)[1] == "<think>\nOkay"


def test_a_token_of_the_template_alone_divides_turns():
    """Some checkpoints have turns between tokens that are added, but not special."""
    tokenizer = load_tokenizer("bytelevel")
    prompt = "<tool_call>What is <reason>?</tool_call>Hello"
    assert prefix_of(tokenizer, TYPED, "<s>" + prompt) == ""
    parted = tokenizer_with("<tool_call>{{ messages[0].content }}</tool_call>")
    assert prefix_of(parted, TYPED, f"{prompt}<reason>") == "<reason>"
    assert prefix_of(parted, TYPED, f"{prompt}<reason>a") == "<reason>a"
    assert prefix_of(tokenizer, TYPED, f"<s>{prompt}<reason>a") == ""


@pytest.mark.parametrize("thought", ["so", LONG], ids=["short", "long"])
@pytest.mark.parametrize("field", ["reasoning_content", "content"])
def test_a_message_in_harmony_is_continued(harmony, thought, field):
    final = {"role": "assistant", "content": "", field: thought}
    messages = [{"role": "user", "content": "hi"}, final]
    ends = {"add_generation_prompt": False, "continue_final_message": field}
    ids = encode_chat(harmony, messages, **ends)
    result = answer_begun(harmony, HARMONY, ids)[1]
    channel = "analysis" if field != "content" else "final"
    assert result == f"<|start|>assistant<|channel|>{channel}<|message|>"
    stream = TextStream(harmony, reasoning=HARMONY, prompt_ids=ids)
    delta = Delta(parts=stream.push(harmony.encode(" on and on", add_special_tokens=False)))
    shown = delta.reasoning if channel == "analysis" else delta.text
    assert shown == " on and on"


def test_a_message_in_harmony_that_has_come_to_its_end_is_not(harmony):
    said = "<|start|>assistant<|channel|>analysis<|message|>a"
    assert prefix_of(harmony, HARMONY, said + "<|end|>") == ""
    assert prefix_of(harmony, HARMONY, said + "<|end|><|start|>assistant") == "<|start|>assistant"
    assert prefix_of(harmony, HARMONY, "no marks") == ""
    typed = harmony.encode(said, parse_special=True) + harmony.encode("<|end|>")
    assert answer_begun(harmony, HARMONY, typed)[1] == said.removesuffix("a")


def test_continued_reasoning_keeps_its_leading_space():
    tokenizer = load_tokenizer("bytelevel")
    answer = tokenizer.encode(" said hi.\n</think>\n\nHello", parse_special=True)
    for thought, expected in (("\nOkay, the user", " said hi."), ("\n", "said hi.")):
        ids = tokenizer.encode(f"<think>{thought}", parse_special=True)
        stream = TextStream(tokenizer, reasoning=THINK, prompt_ids=ids)
        delta = Delta(parts=stream.push(answer))
        assert (delta.reasoning, delta.text) == (expected, "Hello")


@pytest.mark.parametrize("reasoning", [THINK, TYPED, HARMONY], ids=["tokens", "text", "harmony"])
def test_a_long_prompt_is_looked_through_once(harmony, reasoning):
    ids = [97] * 400_000
    began = time.process_time()
    answer_begun(harmony, reasoning, ids)
    assert time.process_time() - began < 1
