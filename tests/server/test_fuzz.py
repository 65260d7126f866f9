"""Odd requests of every kind are answered, and the server stays whole."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import CHAT, LiveServer
from scripted import ScriptedServer

from mlxinfer.server.apis.chat import ChatRequest
from mlxinfer.server.apis.completions import CompletionRequest
from tests.tables import words

EXTREMES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308),
    *("", "a", "\0", "é→🙂", "<|im_end|>", "x" * 3000, [], {}, [[]], [{}], {"": None}, [None]),
    *({"type": "text"}, {"type": "json_object"}, {"999999": 1}, {"5": -100}, ["a", 1], [0, 2047]),
]
values = st.one_of(
    st.sampled_from(EXTREMES),
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 3000) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    ),
)
FINE: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
messages = [{"role": "user", "content": "Hello"}]


def check(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        assert len(answer.content) < 5000


def requests_of(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = [n for n in kind.__struct_fields__ if n not in ("max_tokens", "n", "stream")]
    return st.dictionaries(st.sampled_from(names), values, max_size=3)


@given(fields=requests_of(ChatRequest))
def test_chat_answers_anything(live: LiveServer, fields: dict[str, Any]) -> None:
    check(live, CHAT, {**FINE, "messages": messages, **fields})


@given(fields=requests_of(CompletionRequest))
def test_completions_answer_anything(live: LiveServer, fields: dict[str, Any]) -> None:
    check(live, "/v1/completions", {**FINE, "prompt": "Hello", **fields})


def test_and_the_server_is_whole(server: LiveServer) -> None:
    server.check_idle()


ODD: list[Any] = [
    *(None, True, 0, -1, 2**64, 0.5, "", "a", "\0", "é🙂", "<|im_end|>", "<tool_call>", [], {}),
    *([{}], [None], {"": None}, {"type": "object"}, {"type": "text", "text": "x"}, "x" * 3000),
    *({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"type": ["string", 1]}),
    *({"properties": {"a": None}}, {"properties": []}, {"required": "a"}, {"enum": [[]]}),
]
KINDS = ["text", "thinking", "tool_use", "tool_result", "image", "message", "reasoning"]
KINDS += ["function", "function_call", "function_call_output", "input_text", "custom", "tool"]
KEYS = ["type", "role", "content", "text", "id", "name", "input", "arguments", "call_id", "output"]
KEYS += words("tool_use_id function parameters input_schema strict tool_calls is_error")
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
odd = st.sampled_from(ODD)
things = st.recursive(
    odd,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4).flatmap(
            lambda given: st.fixed_dictionaries(
                {"type": st.sampled_from(KINDS)}, optional={"role": ROLES}
            ).map(lambda rest: {**given, **rest})
        )
    ),
    max_leaves=8,
)
TOOL = {"name": "f", "parameters": {}, "input_schema": {}, "type": "function"}
FRAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.script.text = 'x <tool_call>{"name": "f", "arguments": {"a": '
        yield server


def check_said(server: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    server.script.requests.clear()
    assert answer.status_code in (200, 400), (body, answer.text)
    assert "Traceback" not in answer.text
    assert len(answer.content) < 10_000


def fields(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), things, max_size=2)


@given(given_=fields("tools", "tool_choice", "parallel_tool_calls", "messages"), items=things)
def test_chat_with_tools_answers_anything(
    scripted: ScriptedServer, given_: dict[str, Any], items: Any
) -> None:
    messages = [{"role": "user", "content": "x"}, *(items if isinstance(items, list) else [items])]
    check_said(scripted, CHAT, {"messages": messages, "tools": [FRAMED], **given_})


@given(
    given_=fields("tools", "tool_choice", "system", "thinking", "output_config", "messages"),
    content=things,
    role=ROLES,
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_answer_anything(
    scripted: ScriptedServer, path: str, given_: dict[str, Any], content: Any, role: str
) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": content}]
    body = {"max_tokens": 5, "messages": messages, "tools": [{**TOOL, "type": "custom"}], **given_}
    check_said(scripted, path, body)


@given(
    given_=fields("tools", "tool_choice", "text", "reasoning", "include", "metadata", "input"),
    items=things,
)
def test_responses_answer_anything(
    scripted: ScriptedServer, given_: dict[str, Any], items: Any
) -> None:
    given_input = items if isinstance(items, (list, str)) else [items]
    check_said(scripted, "/v1/responses", {"input": given_input, "tools": [TOOL], **given_})
