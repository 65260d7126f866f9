"""Tools in a conversation: which format a model has, what it is shown, what a request may ask."""

import pytest
from text_data import load_tokenizer, tokenizer_with
from tool_samples import TOOLS

from mlxinfer.errors import InvalidRequestError, TemplateError
from mlxinfer.text import GENERIC, ChatTemplate, ToolUse, detect_tools, encode_chat, tool_format
from mlxinfer.text.tools import FORMATS

HI = [{"role": "user", "content": "hi"}]


def test_a_format_may_be_named():
    for known in (*FORMATS, GENERIC):
        assert detect_tools(tokenizer_with("{{ tools }}"), known.name) is known


def test_a_template_without_a_format_gets_the_generic_one():
    assert detect_tools(tokenizer_with("{{ messages }}")) is GENERIC
    assert detect_tools(tokenizer_with("{{ messages }}{{ tools }}")) is GENERIC
    assert tool_format("generic") is GENERIC
    with pytest.raises(InvalidRequestError, match="hermes"):
        tool_format("unheard-of")


def test_tools_need_a_chat_template():
    tokenizer = load_tokenizer("bytelevel")
    assert detect_tools(tokenizer) is GENERIC
    with pytest.raises(TemplateError, match="no chat template"):
        ToolUse.plan(tokenizer, GENERIC, TOOLS)


def test_a_template_with_a_broken_source_knows_nothing():
    assert not ChatTemplate("{% if tools").reads("tools")
    assert ChatTemplate({"default": "x", "tool_use": "{{ tools }}"}).reads("tools")
    assert not ChatTemplate("{% set tools = 1 %}").reads("tools")


def plan(choice=None, tools=TOOLS, **options):
    tokenizer = load_tokenizer("bytelevel", "chatml_tools")
    return ToolUse.plan(tokenizer, detect_tools(tokenizer), tools, choice, **options)


def test_a_tool_choice_says_what_must_be_called():
    assert not plan().must_call
    assert not plan("auto").must_call
    assert plan("none") is None
    assert plan("required").must_call
    named = plan({"type": "function", "function": {"name": "now"}}, parallel=False)
    assert (named.must_call, named.only, named.parallel) == (True, "now", False)


def test_which_answers_a_grammar_rules():
    tokenizer = load_tokenizer("bytelevel", "chatml_tools")
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    assert plan().grammar(tokenizer, None, []) is None
    assert plan("required").grammar(tokenizer, None, []).startswith("start: ")
    free = plan(tools=strict).grammar(tokenizer, None, [])
    assert "(?s:.+)" in free
    assert plan(tools=strict).schemas[0] == (
        "tools[0].function.parameters",
        TOOLS[0]["function"]["parameters"],
    )


def test_tools_without_their_frame_are_shown_in_it():
    shown = plan(tools=[{"name": "f", "parameters": {}}]).shown
    assert shown == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def conversation(arguments, content=None):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        *HI,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]


def rendered(template, messages):
    tokenizer = tokenizer_with(template)
    return tokenizer.decode(encode_chat(tokenizer, messages), skip_special_tokens=False)


CALL = "{% for m in messages %}{% for c in m.tool_calls %}[%s]{% endfor %}{% endfor %}"

ITEMS = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
APPENDED = "{{ m['content'] + c.function.name + c.function.arguments }}"


@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_arguments_are_what_a_template_makes_of_them(arguments):
    """Objects; or text, where it appends them to others."""
    for written, text in (
        ("{{ c.function.arguments | tojson }}", '[{"a": "é"}]'),
        (ITEMS, "[a=é]"),
        (APPENDED, '[f{"a": "é"}]'),
    ):
        assert rendered(CALL.replace("%s", written), conversation(arguments)) == text


def test_the_first_template_error_is_raised_if_both_forms_fail():
    with pytest.raises(TemplateError, match="refused"):
        rendered("{{ raise_exception('refused') }}", conversation("{}"))


def test_arguments_that_are_no_json_stay():
    template = CALL.replace("%s", "{{ c.function.arguments }}")
    assert rendered(template, conversation('{"a": ')) == '[{"a": ]'
    assert rendered(template, conversation("")) == "[{}]"


def test_a_tool_message_gets_the_name_of_its_tool():
    template = "{% for m in messages %}{{ m.name }}{% endfor %}"
    assert rendered(template, conversation("{}")) == "f"
    named = conversation("{}")
    named[-1]["name"] = "g"
    assert rendered(template, named) == "g"


def test_calls_without_their_frame_and_other_oddities():
    template = CALL.replace("%s", "{{ c.name }}{{ c.arguments.a }}")
    messages = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}]
    assert rendered(template, messages) == "[f1]"
    assert rendered("{{ messages[0].tool_calls }}", [{"role": "x", "tool_calls": "odd"}]) == "odd"


def test_a_control_token_in_arguments_stays_text():
    tokenizer = tokenizer_with("<|im_start|>" + CALL.replace("%s", "{{ c.function.arguments }}"))
    ids = encode_chat(tokenizer, conversation('{"a": "<|im_end|>"}'))
    assert tokenizer.piece_to_id("<|im_end|>") not in ids
