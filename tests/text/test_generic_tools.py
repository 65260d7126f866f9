"""Tools for templates that know none: instructions, calls and results as text."""

import json

import pytest
from test_tools_chat import HI, TOOLS, conversation
from tool_samples import TOOLS as MORE

from mlxinfer.outputs import joined_calls
from mlxinfer.text import ChatTemplate, facts_of, generic_messages, has_calls
from mlxinfer.text.tools import GENERIC, Toolbox, ToolParser

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TURNS = (  # as Gemma's: no system message, and user and assistant take turns
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('take turns') }}{% endif %}{% endfor %}" + PLAIN
)
SILENT = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
LONG = [
    *conversation('{"city": "Oslo"}', "Let me see."),
    {"role": "tool", "tool_call_id": "c2", "content": "6"},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("source", [PLAIN, TURNS, SILENT])
def test_every_template_writes_tools_calls_and_results(source):
    template = ChatTemplate(source)
    chat = facts_of(template).forms.apply(generic_messages(LONG, TOOLS), GENERIC.write)
    text = template.render(chat)
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in text
    assert text.index("get_weather") < text.index("Let me see.")
    assert '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "<tool_response>\n5\n</tool_response>\n<tool_response>\n6" in text
    assert text.rstrip().endswith("</tool_response>\nAnd now?")


def test_a_system_message_keeps_its_text():
    system = {"role": "system", "content": "Be brief."}
    first, *rest = generic_messages([system, *HI], TOOLS)
    assert first["content"].startswith("Be brief.\n\n# Tools")
    assert rest == HI


def test_what_has_no_tools_stays_as_it_is():
    chat = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert generic_messages(chat, None) == chat
    assert not has_calls(chat)
    assert has_calls(LONG)


def test_calls_in_the_generic_form_are_found():
    shown = generic_messages(LONG, None)[1]["content"]
    parser = ToolParser(GENERIC, Toolbox.of(MORE))
    parts = [*parser.push(shown), *parser.finish()]
    assert parts[0].text.strip() == "Let me see."
    (call,) = joined_calls(parts[1:])
    assert (call.name, json.loads(call.arguments)) == ("f", {"city": "Oslo"})
