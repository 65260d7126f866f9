"""Chat templates against what transformers renders, and their limits."""

import enum
import time
from collections import namedtuple

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


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ '' ",
        "{% for x in %}",
        "{{ " + "(" * 50_000,
        "{% if 1 %}" * 200,
        "{{ 1 / 0 }}",
        "{{ missing.field }}",
        "{{ raise_exception('refused') }}",
        "{% include 'other' %}",
        "{{ 'a' + 1 }}",
        "x" * (2 << 20),
    ],
)
def test_a_broken_template_is_a_template_error(source):
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ (''|attr('__class__')) }}",
        "{{ ''['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ],
)
def test_the_sandbox_shows_no_internals(source):
    template = ChatTemplate(source)
    try:
        shown = template.render(HI)
    except TemplateError:
        return
    assert shown == ""


HOSTILE = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "loops in a macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    ),
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that recurses": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a long string": "{{ 'x' * 10**9 }}",
    "a long list": "{{ [1] * 10**9 }}",
    "a list of long strings": "{{ (['a' * 1000000] * 1000) | join }}",
    "a long separator": "{{ ('b' * 4000000).join(['a'] * 100000) }}",
    "doubling": (
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    ),
    "doubling by +": (
        "{% set n = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    ),
    "shared lists": (
        "{% set n = namespace(x=['a']) %}"
        "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "shared dicts": (
        "{% set n = namespace(x=1) %}"
        "{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | tojson }}"
    ),
    "shared arguments": (
        "{% macro f(n) %}{{ f(n - 1, varargs, varargs) if n else varargs }}{% endmacro %}"
        "{{ f(60, 1) }}"
    ),
    "a wide field": "{{ '%1000000000d' % 1 }}",
    "a wide field by argument": "{{ '%*d' % (1000000000, 1) }}",
    "a wide field in a filter": "{{ '%1000000000d' | format(1) }}",
    "a wide field in format": "{{ '{:>1000000000}'.format(1) }}",
    "a nested field in format": "{{ '{:>{w}}'.format(1, w=10**9) }}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "padding by a filter": "{{ 'a' | center(1000000000) }}",
    "indentation": "{{ ('a\\n' * 1000000) | indent(1000000) }}",
    "indented JSON": "{{ [[1]] | tojson(indent=1000000) }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(1000000) }}",
    "replacement": "{% set x = 'a' * 5000000 %}{{ x.replace('a', x) }}",
    "replacement by a filter": "{% set x = 'a' * 5000000 %}{{ x | replace('a', x) }}",
    "translation": "{% set x = 'a' * 5000000 %}{{ x.translate({97: x}) }}",
    "repeated arguments": "{% set x = 'a' * 5000000 %}{{ ('{0}' * 100).format(x) }}",
    "batches": "{{ [1, 2] | batch(1000000000, 1) | list }}",
    "bytes": "{{ (1).to_bytes(1000000000) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "squares": (
        "{% set n = namespace(x=9) %}"
        "{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}"
    ),
    "a range": "{{ range(10**9) | list }}",
    "much output": "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
    "comparisons": (
        "{% set a = range(100000) | map('string') | list %}"
        "{% for i in range(100000) %}{{ a == a | list }}{% endfor %}"
    ),
    "a block of literals": (
        "{% set x %}{% for i in range(100000) %}" + "y" * 100_000 + "{% endfor %}{% endset %}"
    ),
    "a block of one value": (
        "{% set y = 'y' * 5000000 %}"
        "{% set x %}{% for i in range(100000) %}{{ y }}{% endfor %}{% endset %}"
    ),
    "a macro's text": (
        "{% macro f() %}{% for i in range(100000) %}{{ 'y' * 1000 }}{% endfor %}{% endmacro %}"
        "{% set x = f() %}"
    ),
    "slices": "{% set y = 'y' * 5000000 %}"
    + "".join(f"{{% set x{i} = y[1:] %}}" for i in range(400)),
    "blocks that call blocks": "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}"
        for i in range(60)
    )
    + "{% block b60 %}{% endblock %}",
    "slow patterns": "{{ ('<' * 5000000) | striptags }}",
    "constants": "{{ 'a' | center(1000000) }}" * 400,
    "lists added up": "{{ ([[1] * 10] * 60000) | sum(start=[]) | length }}",
    "a range joined": "{{ range(150) | join('x' * 7000000) | length }}",
    "keys joined": "{{ ('x' * 7000000).join(dict.fromkeys('abcdefghijklmnopqrstuvwxyz')) }}",
    "bytes replaced": "{{ ('x' * 2000000).encode().replace('x'.encode(), 'y'.encode() * 500) }}",
    "bytes joined": "{{ ('x' * 7000000).encode().join(['a'.encode()] * 150) }}",
    "a huge number": "{{ ('f' * 2000000) | int(0, 16) }}",
    "a huge quotient": "{{ (9 ** 3000) * (9 ** 100) // (9 ** 3000) }}",
    "a wide date": "{{ strftime_now('%1000000000d') }}",
    "a long date": "{{ strftime_now('x' * 3000000) }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped(source):
    template = ChatTemplate(source, deadline_s=0.3)
    began = time.process_time()
    with pytest.raises(TemplateError, match=r"was stopped|larger than MAX_RANGE"):
        template.render(HI)
    assert time.process_time() - began < 5  # the deadline and a generous step beyond it


def test_limits_grow_with_the_messages():
    long = "word " * 1_000_000
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim ~ '!' }}{% endfor %}")
    assert len(template.render([{"role": "user", "content": long}] * 3)) == 3 * len(long)


def test_lists_may_grow_one_by_one():
    """Templates that merge messages do this; their lists share the messages."""
    template = ChatTemplate(
        "{% set n = namespace(all=[]) %}"
        "{% for m in messages %}{% set n.all = n.all + [m] %}{% endfor %}{{ n.all | length }}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 500
    assert template.render(messages) == "500"


def test_a_template_is_usable_after_it_was_stopped():
    template = ChatTemplate("{% if big %}{{ 'x' * 10**9 }}{% else %}fine{% endif %}")
    with pytest.raises(TemplateError, match="stopped"):
        template.render(HI, big=True)
    assert template.render(HI, big=False) == "fine"
