"""What a chat template takes is found out once: levels of thinking, forms of messages."""

import pytest

from mlxinfer.text import ChatTemplate, facts_of
from mlxinfer.text.samples import TemplateFacts, probe
from mlxinfer.text.template import MAX_SOURCE_CHARS
from mlxinfer.text.thinking import EFFORTS, OFF, ON

TURNS = (
    "{%- for m in messages %}SYS<{{ m.role }}>{{ m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>GEN{%- endif %}"
)
REFUSES = (
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{%- endif %}"
)
PARTS = (
    "{%- for m in messages %}<{{ m.role }}>{%- for p in m.content %}"
    "{%- if p['type'] == 'text' %}{{ p['text'] }}{%- else %}[image]{%- endif %}"
    "{%- endfor %}{%- endfor %}"
)
FIRST = "{%- for m in messages %}<{{ m.role }}>{{ m.content[0]['text'] }}{# image #}{%- endfor %}"


def turns(gen="", system=""):
    return TURNS.replace("SYS", system).replace("GEN", gen)


GENERATION = {  # template -> (levels, {wish: variables})
    "nothing": (turns(), (), {}),
    "switch": (
        turns("{{ '<think>' if thinking is undefined or thinking else '<think></think>' }}"),
        (OFF, ON),
        {OFF: {"thinking": False}, "low": {"thinking": True}},
    ),
    "mode": (
        turns("{{ '</think>' if thinking_mode == 'disabled' else '<think>' }}"),
        (OFF, ON),
        {OFF: {"thinking_mode": "disabled"}, ON: {}},
    ),
    "levels": (
        turns(
            "{% if reasoning_effort not in ('low', 'xhigh') %}{{ raise_exception('no') }}"
            "{% endif %}{{ reasoning_effort }}"
        ),
        ("low", "xhigh"),
        {"minimal": {"reasoning_effort": "low"}, "high": {"reasoning_effort": "xhigh"}},
    ),
    "any word": (
        turns("{{ reasoning_strength or 'high' }}"),
        ("low", "medium", "high"),
        {"max": {"reasoning_strength": "high"}, ON: {}},
    ),
    "flag": (
        turns("{{ 'briefly' if low_effort }}"),
        ("low", "high"),
        {"minimal": {"low_effort": True}, "max": {}},
    ),
    "off is an effort": (
        turns("{{ '<think>' }}{{ '</think>' if reasoning_effort in ('low', 'minimal') }}"),
        (OFF, ON, "high"),
        {OFF: {"reasoning_effort": "minimal"}, "low": {"reasoning_effort": "high"}},
    ),
    "a number": (
        turns("Thinking effort level: {{ reasoning_effort | default(0.9) | float }}"),
        (OFF, ON, "minimal", "low", "medium", "high", "xhigh"),
        {
            **{OFF: {"reasoning_effort": 0.0}, ON: {}, "minimal": {"reasoning_effort": 0.1}},
            **{"high": {"reasoning_effort": 0.9}, "max": {"reasoning_effort": 0.99}},
        },
    ),
    "a number that refuses words": (
        turns("{{ '%.2f' | format(effort if effort is defined else 0.9) }}"),
        (OFF, ON, "minimal", "low", "medium", "high", "xhigh"),
        {OFF: {"effort": 0.0}, "low": {"effort": 0.2}},
    ),
    "budget": (
        turns("{{ thinking_budget }}{{ '</think>' if thinking_budget == 0 }}"),
        (OFF, ON, *EFFORTS[1:]),
        {OFF: {"thinking_budget": 0}, "low": {"thinking_budget": 1024}, "max": {}},
    ),
}


@pytest.mark.parametrize("name", GENERATION)
def test_levels_of_thinking_are_read_off_the_template(name):
    source, levels, wishes = GENERATION[name]
    thinking = facts_of(ChatTemplate(source)).thinking
    assert thinking.levels == levels
    assert {wish: thinking.wishes[wish] for wish in wishes} == wishes


def test_facts_survive_the_way_from_their_process():
    template = ChatTemplate(PARTS)
    facts = probe(template)
    assert facts_of(template) == facts
    assert facts.variables == {"m", "p"}


@pytest.mark.parametrize("source", ["{% if %}", "x" * (MAX_SOURCE_CHARS + 1)])
def test_nothing_is_known_of_a_broken_template(source):
    assert probe(ChatTemplate(source)) == TemplateFacts()


def test_the_forms_that_a_template_takes_are_found():
    system_first = probe(ChatTemplate(turns(system=REFUSES))).forms
    assert system_first.system
    assert not system_first.later_system
    assert set(probe(ChatTemplate(PARTS)).forms.parts) >= {"system", "user", "assistant"}
    assert probe(ChatTemplate(FIRST)).forms.first_part == ("user",)
