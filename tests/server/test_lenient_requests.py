"""Requests that clients send in good faith: what changes nothing here is no reason to refuse."""

from typing import Any

import anthropic
import openai
import pytest
from live_server import CHAT, LiveServer, chat
from scripted import ScriptedServer

from mlxinfer.server.keys import ApiKeys

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_base_url_may_end_as_it_likes(server: LiveServer, path: str) -> None:
    given: Any = {"base_url": server.url + path, "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**given) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
        answer = client.chat.completions.create(model="demo", messages=HI, max_tokens=2)
        assert answer.choices[0].message.content
        assert client.responses.create(model="demo", input="Hi", max_output_tokens=2).output_text
    with anthropic.Anthropic(**given) as client_:
        assert client_.messages.create(model="demo", messages=HI, max_tokens=2).content


@pytest.mark.parametrize("path", [f"{CHAT}/", "/chat/completions", "/v1/v1/chat/completions"])
def test_a_path_may_be_written_otherwise(server: LiveServer, path: str) -> None:
    assert server.post(path, chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/none", "/chat", "/v1", "/v2/models", "/docs/"])
def test_other_paths_are_not_found(server: LiveServer, path: str) -> None:
    assert server.get(path).status_code == 404


def test_a_path_written_otherwise_needs_the_key_all_the_same() -> None:
    with LiveServer(keys=ApiKeys.from_plain(["secret"])) as server:
        for path in ("/models", "/v1/models/", "/v1/v1/models", "/health/", "/v1//models"):
            assert server.get(path).status_code == 401, path


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_counts_in_every_event(server: LiveServer, path: str) -> None:
    fields = {"include_usage": True, "continuous_usage_stats": True}
    body: Any = {"max_tokens": 6, "ignore_eos": True, "stream_options": fields}
    body |= {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    *events, done = server.events(path, body)
    assert done == "[DONE]"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(set(counts)) > 2
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


def test_redacted_thoughts_of_others_are_left_out(scripted: ScriptedServer) -> None:
    blocks = [{"type": "redacted_thinking", "data": "c2VjcmV0"}, {"type": "text", "text": "Hello"}]
    history = [*HI, {"role": "assistant", "content": blocks}, *HI]
    with scripted.says("x"):
        answer = scripted.post("/v1/messages", {"messages": history, "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        assert "Hello" in scripted.prompt
        assert "c2VjcmV0" not in scripted.prompt


def test_a_tool_may_say_nothing(scripted: ScriptedServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        *HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": None},
    ]
    with scripted.says("x"):
        assert scripted.post(CHAT, {"messages": history}).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"truncation": "auto"},
        *({"reasoning": {"summary": summary}} for summary in ("auto", "concise", "detailed")),
        *({"text": {"verbosity": verbosity}} for verbosity in ("low", "medium", "high")),
    ],
)
def test_wishes_of_responses_are_taken(scripted: ScriptedServer, fields: dict[str, Any]) -> None:
    with scripted.says("x"):
        answer = scripted.post("/v1/responses", {"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["store"] is False
