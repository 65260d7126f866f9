"""Chat templates against what transformers renders, and their sandbox."""

import enum
from collections import namedtuple
from contextlib import suppress

import pytest
from text_data import NOW, read_data, read_template

from mlxinfer.errors import TemplateError
from mlxinfer.text import ChatTemplate

HI = [{"role": "user", "content": "hi"}]
VARIABLES = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
NAMES = sorted({case["case"][0] for case in read_data("renderings.json")})


@pytest.mark.parametrize("name", NAMES)
def test_renders_what_transformers_renders(name):
    template = ChatTemplate(read_template(name), variables=VARIABLES, now=lambda: NOW)
    cases = [case for case in read_data("renderings.json") if case["case"][0] == name]
    assert len(cases) > 50
    for case in cases:
        _, conversation, option = case["case"]
        messages = read_data("conversations.json")[conversation]
        options = {"add_generation_prompt": False, **read_data("options.json")[option]}
        if case["text"] is None:
            with pytest.raises(TemplateError):
                template.render(messages, **options)
        else:
            assert template.render(messages, **options) == case["text"], case["case"]


def test_messages_are_left_as_they_were():
    messages = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
    template = ChatTemplate(read_template("docs_continue"))
    template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "go"}]}]


def test_tools_choose_the_template_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=[]) == "tools"
    with pytest.raises(TemplateError, match="none is called default"):
        ChatTemplate({"rag": "x", "tool_use": "y"}).render(HI)


def test_objects_reach_the_template_as_plain_data():
    class Role(enum.StrEnum):
        USER = "user"

    class Loud:
        def shout(self):
            raise AssertionError("a template called a method")

    messages = [{"role": Role.USER, "content": Loud()}]
    template = ChatTemplate("{{ messages[0].role }} {{ messages[0].content }}")
    assert template.render(messages) == "user <Loud>"


def test_named_tuples_are_tuples_to_a_template():
    Pair = namedtuple("Pair", "a b")
    messages = [{"role": "user", "content": "x", "pair": Pair(1, [2])}]
    assert ChatTemplate("{{ messages[0].pair }}").render(messages) == "(1, [2])"


def test_request_variables_win_over_the_tokenizers():
    template = ChatTemplate("{{ bos_token }}{{ extra }}", variables={"bos_token": "<s>"})
    assert template.render(HI, bos_token="<b>", extra=1) == "<b>1"


@pytest.mark.parametrize("messages", [[], "text", [1], [None], {"role": "user"}])
def test_what_are_no_messages_is_refused(messages):
    with pytest.raises(TemplateError):
        ChatTemplate("x").render(messages)


def test_a_broken_template_is_a_template_error() -> None:
    broken = [
        *("{% if %}", "{{ '' ", "{% for x in %}", "{{ " + "(" * 50_000, "{% if 1 %}" * 200),
        "{{ 1 / 0 }}", "{{ missing.field }}", "{{ raise_exception('refused') }}",
        *("{% include 'other' %}", "{{ 'a' + 1 }}", "x" * (2 << 20)),
    ]  # fmt: skip
    for source in broken:
        with pytest.raises(TemplateError):
            ChatTemplate(source).render(HI)


def test_the_sandbox_shows_no_internals() -> None:
    probes = [
        "{{ messages.__class__ }}", "{{ ''.__class__.__mro__ }}", "{{ (''|attr('__class__')) }}",
        "{{ ''['__class__'] }}", "{{ raise_exception.__globals__ }}", "{{ namespace.__init__ }}",
        "{{ strftime_now.__globals__ }}", "{{ '{0.__class__}'.format('') }}",
        "{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace(_x=1) %}", "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ]  # fmt: skip
    for source in probes:
        shown = ""
        with suppress(TemplateError):
            shown = ChatTemplate(source).render(HI)
        assert shown == ""
