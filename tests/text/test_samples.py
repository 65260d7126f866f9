"""A template that does not end is found once, in a process of its own."""

import pytest
from text_data import read_template, tokenizer_with

from mlxinfer.errors import TemplateError
from mlxinfer.text import ChatTemplate, encode_chat, environment, samples
from mlxinfer.text.samples import rendered_samples, samples_of

HI = [{"role": "user", "content": "hi"}]
HOSTILE = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a long string": "{{ 'x' * 10**10 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "constants": "{{ 'a' | center(1000000000) }}" * 400,
}


@pytest.mark.alike
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped(source, monkeypatch):
    monkeypatch.setattr(samples._process, "max_seconds", 1.0)
    tokenizer = tokenizer_with(source)
    try:
        with pytest.raises(TemplateError, match="was stopped"):
            encode_chat(tokenizer, HI)
    except MemoryError:  # pragma: no cover
        pytest.fail("it filled the memory of this process")
    with monkeypatch.context() as found_once:
        found_once.setattr(samples, "_process", None)
        with pytest.raises(TemplateError, match="was stopped"):
            encode_chat(tokenizer, HI)
    fine = ChatTemplate("{{ messages[0].content }}")
    assert samples_of(fine)["plain"] == "Begin.", "others go on"


@pytest.mark.parametrize("name", ["chatml_tools", "brackets", "channels", "turns", "filters"])
def test_the_process_renders_what_is_rendered_here(name):
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(read_template(name), variables=variables)
    assert samples_of(template) == rendered_samples(template)


def test_a_template_that_loops_for_some_messages_is_stopped(monkeypatch):
    later = "{% if messages|length > 40 %}" + HOSTILE["nested loops"] + "{% endif %}fine"
    monkeypatch.setattr(environment, "MAX_LOOP_S", 0.2)
    tokenizer = tokenizer_with(later)
    assert encode_chat(tokenizer, HI)
    with pytest.raises(TemplateError, match="chat template was stopped: its loops took"):
        encode_chat(tokenizer, HI * 41)
    assert encode_chat(tokenizer, HI)
