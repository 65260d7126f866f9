"""What a request hears of the chat template of its model: wishes without effect, and failures."""

import time
from typing import Any

import pytest
from scripted import ScriptedServer, teach

from mlxinfer.text import samples

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hello"}]
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SWITCH = TURNS + "{% if enable_thinking is false %}<think></think>{% endif %}"
WISHES: list[tuple[str, dict[str, Any]]] = [  # not to think
    (CHAT, {"messages": HI, "reasoning_effort": "none"}),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}),
    (RESPONSES, {"input": "Hello", "reasoning": {"effort": "none"}}),
    (MESSAGES, {"messages": HI, "thinking": {"type": "disabled"}, "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), WISHES)
def test_ignored_wishes_are_noted(
    scripted: ScriptedServer, path: str, body: dict[str, Any]
) -> None:
    with scripted.says("Hello."):
        teach(scripted.model, SWITCH)
        heard = scripted.post(path, body)
        assert heard.status_code == 200, heard.text
        assert "x-mlxinfer-skipped" not in heard.headers
        assert scripted.prompt.endswith("<think></think>")
        teach(scripted.model, TURNS)
        unheard = scripted.post(path, body)
    said = "unread" if unheard.status_code == 400 else unheard.headers.get("x-mlxinfer-skipped", "")
    names = ("reasoning_effort", "enable_thinking", "thinking")
    assert unheard.status_code == 200, unheard.text
    assert any(name in said for name in names), said


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BAD = {
    "loops": LOOPS,
    "raises": "{{ raise_exception('No.') }}",
    "is broken": "{% if",
    "is long": "{{ messages }}" + "x" * (1 << 20),
    "calls what it must not": "{{ messages.__class__.__mro__ }}",
}


@pytest.mark.alike
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_template_ends_with_an_error_that_names_it(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(samples._process, "max_seconds", 1.0)
    with scripted.says("Hello."):
        teach(scripted.model, BAD[kind])
        begun = time.monotonic()
        for _ in range(2):
            answer = scripted.post(CHAT, {"messages": HI})
            assert answer.status_code == 400, answer.text
            assert "chat template" in answer.json()["error"]["message"]
        assert time.monotonic() - begun < 30
        text = scripted.post("/v1/completions", {"prompt": "Hello", "max_tokens": 3})
        assert text.status_code == 200, "plain prompts go on"
        teach(scripted.model, TURNS)
        assert scripted.post(CHAT, {"messages": HI}).status_code == 200
