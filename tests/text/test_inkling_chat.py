"""Inkling: blocks of a conversation as its authors write them, and how answers are read."""

import pytest
from talking import CALLS, SAID, THOUGHT, TOOLS, read, tokenizer_of, written_turn

from mlxinfer.text import ChatTemplate, ToolUse, detect_reasoning, detect_tools
from mlxinfer.text.samples import probe
from mlxinfer.text.tokenizer_files import OWN_TEMPLATES
from mlxinfer.text.tools.use import AnswerGrammar

SOURCE = (OWN_TEMPLATES / "inkling2_loop.jinja").read_text()
SPEC = {
    "type": "function",
    "function": {
        **{"name": "get_weather", "description": "The weather."},
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {
        **{"role": "assistant", "content": "Let me see.", "reasoning_content": "hm"},
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "ok"},
    {"role": "user", "content": "thx"},
]
WRITTEN = (  # by tml-renderers 0.4.2, v0.Renderer.render_for_completion_with_effort(..., 0.9)
    '<|message_system|><|content_xml|>[{"description":"The weather.","name":"get_weather",'
    '"parameters":{"properties":{"city":{"type":"string"}},"type":"object"},"type":"function"}]'
    "<|end_message|>"
    "<|message_system|><|content_text|>Be brief.<|end_message|>"
    "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
    "<|message_user|><|content_text|>Hi<|end_message|>"
    "<|message_model|><|content_thinking|>hm<|end_message|>"
    "<|message_model|><|content_text|>Let me see.<|end_message|>"
    "<|message_model|>get_weather<|content_invoke_tool_json|>"
    '{"name":"get_weather","args":{"city":"Paris","days":3}}<|end_message|>'
    "<|content_model_end_sampling|>"
    "<|message_tool|>get_weather<|content_text|>sunny<|end_message|>"
    "<|message_model|><|content_thinking|>ok<|end_message|>"
    "<|message_model|><|content_text|>Sunny.<|end_message|><|content_model_end_sampling|>"
    "<|message_user|><|content_text|>thx<|end_message|>"
)
CALLED = '<|content_invoke_tool_json|>{"name":"river_of","args":{"city":"Oslo"}}<|end_message|>'
OSLO = [("river_of", {"city": "Oslo"})]
ANSWERS = {  # behind the mark of the first block -> calls, text, thought
    "a text": ("<|content_text|>Yes.<|end_message|>", ([], "Yes.", "")),
    "a word without marks": ("Yes", ([], "Yes", "")),
    "a text without marks": ("Yes, it is.<|end_message|>", ([], "Yes, it is.", "")),
    "a call at once": (f"river_of{CALLED}", (OSLO, "", "")),
    "its own mark again": (f"<|message_model|>river_of{CALLED}", (OSLO, "", "")),
    "two calls": (f"river_of{CALLED}<|message_model|>river_of{CALLED}", (OSLO * 2, "", "")),
    "thoughts around a text": (
        "<|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>"
        f"<|message_model|><|content_thinking|>c<|end_message|><|message_model|>river_of{CALLED}",
        (OSLO, "b", "ac"),
    ),
    "an open thought": ("<|content_thinking|>hm, ", ([], "", "hm,")),
}


def test_a_conversation_is_that_of_its_authors():
    template = ChatTemplate(SOURCE)
    rendered = template.render(CHAT, tools=[SPEC], add_generation_prompt=True)
    assert rendered == f"{WRITTEN}<|message_model|>"


def test_a_picture_is_a_block_of_its_own():
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    text = ChatTemplate(SOURCE).render([{"role": "user", "content": parts}])
    assert text.endswith(
        "<|message_user|><|content_image|><|unused_200054|><|end_message|>"
        "<|message_user|><|content_text|>What?<|end_message|><|message_model|>"
    )


@pytest.mark.parametrize(
    ("effort", "written"), [("none", "0"), ("low", "0.2"), (None, "0.9"), ("max", "0.99")]
)
def test_an_effort_is_a_number(effort, written):
    template = ChatTemplate(SOURCE)
    thinking = probe(template).thinking
    variables = thinking.variables(effort)[0] if effort else {}
    text = template.render(CHAT[1:2], add_generation_prompt=True, **variables)
    assert text.startswith(
        f"<|message_system|><|content_text|>Thinking effort level: {written}<|end_message|>"
    )


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("thought", [THOUGHT, ""])
def test_a_turn_is_read_back(has_tokens, thought):
    tokenizer = tokenizer_of(SOURCE, has_tokens=has_tokens)
    prompt, answer = written_turn(tokenizer, thought=thought)
    for turn in read(tokenizer, prompt, answer.removesuffix("<|content_model_end_sampling|>")):
        assert turn == (CALLS, SAID, thought)


@pytest.mark.parametrize("case", ANSWERS)
def test_blocks_come_in_any_order(case):
    answer, wanted = ANSWERS[case]
    tokenizer = tokenizer_of(SOURCE, has_tokens=True)
    prompt = ChatTemplate(SOURCE).render(CHAT, tools=[SPEC], add_generation_prompt=True)
    for turn in read(tokenizer, prompt, answer):
        assert turn == wanted


def test_a_grammar_writes_the_marks_that_are_read():
    tokenizer = tokenizer_of(SOURCE, has_tokens=True)
    reasoning, format = detect_reasoning(tokenizer), detect_tools(tokenizer)
    prompt = ChatTemplate(SOURCE).render(CHAT, tools=TOOLS, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)
    use = ToolUse.plan(tokenizer, format, TOOLS)
    forced = AnswerGrammar(tokenizer, reasoning, ids, use).forced()
    mark = tokenizer.piece_to_id("<|content_invoke_tool_json|>")
    assert '"river_of"' in forced
    assert f"<[{mark}]>" in forced
    text = tokenizer.piece_to_id("<|content_text|>")
    assert f"<[{text}]>" in AnswerGrammar(tokenizer, reasoning, ids, use).main()
