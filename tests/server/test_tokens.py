"""Tokenizing over HTTP."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import CHAT, LiveServer, chat
from models.runs import every
from scripted import TEMPLATE, ScriptedServer

from tests.seeds import seeded
from tests.waiting import wait_until


def test_tokens_are_told_with_their_texts(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": "Hello, world", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048


def test_a_conversation_has_the_tokens_that_chat_counts(server: LiveServer) -> None:
    request = chat("Hello")
    answer = server.post("/tokenize", {"messages": request["messages"]}).json()
    assert "token_strs" not in answer
    counted = server.post(CHAT, request).json()["usage"]["prompt_tokens"]
    assert answer["count"] == counted
    bare = server.post(
        "/tokenize", {"messages": request["messages"], "add_generation_prompt": False}
    ).json()
    assert bare["tokens"] == answer["tokens"][: bare["count"]]
    assert bare["count"] < answer["count"]


SWITCHED = (
    "{% if enable_thinking is defined %}thinks {{ enable_thinking }}{% endif %}"
    "{{ reasoning_effort | default('') }}" + TEMPLATE
)
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIELDS: dict[str, list[Any]] = {  # of chats that change the prompt
    "enable_thinking": [True, False],
    "think": ["low", "high"],
    "reasoning": [{"effort": "low"}, {"max_tokens": 5}],
    "reasoning_budget": [0, 9],
    "chat_template_kwargs": [{"enable_thinking": True}],
    "tools": [[TOOL], [{"type": "custom", "custom": {"name": "g"}}]],
    "tool_choice": ["none", "auto", {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}],
}


def test_a_prompt_is_told_as_chat_makes_it_whatever_the_fields() -> None:
    chance, told = seeded(), set()
    with ScriptedServer(template=SWITCHED) as server, server.says("x"):
        for _ in range(60):
            names = chance.sample(list(FIELDS), chance.randint(0, 3))
            body = chat("Hello", **{name: chance.choice(FIELDS[name]) for name in names})
            answer, counted = server.post(CHAT, body), server.post("/tokenize", body)
            assert counted.status_code == answer.status_code, body
            if answer.status_code == 200:
                told.add(server.prompt)
                assert counted.json()["tokens"] == list(server.script.requests[-1].prompt_ids), body
    assert len(told) > 5


def test_the_template_and_the_named_tokens_are_told(server: LiveServer) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "messages" in info["chat_template"]


@pytest.mark.parametrize("path", every(2, ["/tokenize", "/v1/messages/count_tokens"]))
def test_no_request_waits_for_texts_that_are_only_counted(server: LiveServer, path: str) -> None:
    """More long texts than there are threads of any kind, and others are answered meanwhile."""
    text = "paged attention of a KV cache " * 12_000
    asked = {"prompt": text, "messages": [{"role": "user", "content": text}], "model": "demo"}
    del asked["messages" if path == "/tokenize" else "prompt"]
    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(server.post, path, asked) for _ in range(5)]
        wait_until(lambda: len(server.service.calls) >= 2)
        done = 0
        while not any(job.done() for job in jobs):
            assert server.post("/tokenize", chat("Hello")).status_code == 200
            done += 1
        assert {job.result().status_code for job in jobs} == {200}
    assert done > 2


def test_the_model_s_own_effort_holds_where_a_request_names_none() -> None:
    with ScriptedServer(template="{{ reasoning_effort | default('none') }}" + TEMPLATE) as server:
        server.model.reasoning_effort = "high"
        for fields, effort in (({}, "high"), ({"reasoning_effort": "low"}, "low")):
            with server.says("x"):
                assert server.post(CHAT, chat("Hello", **fields)).status_code == 200
                assert server.prompt.startswith(effort)
