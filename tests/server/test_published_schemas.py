"""Objects that the server sends have the fields and types that published schemas require."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from live_server import CHAT, LiveServer, chat
from scripted import ScriptedServer
from sdk_clients import CITY, FUNCTION, NOW, WEATHER

PUBLISHED = json.loads((Path(__file__).parent / "schemas" / "published.json").read_text())
SAID = f"<think>hm</think>I look.\n{WEATHER}\n{NOW}"
USER: Any = [{"role": "user", "content": "Hi"}]


def check(kind: str, value: Any) -> None:
    jsonschema.Draft202012Validator(PUBLISHED[kind]).validate(value)


RESPONSES: list[dict[str, Any]] = [
    {},
    {"tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "get_weather_now"}]},
    {"max_output_tokens": 9, "tools": [{"type": "function", **FUNCTION}]},
    {"instructions": "x", "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k"},
    {"safety_identifier": "s", "presence_penalty": 1, "top_p": 0.5, "store": True},
    {"truncation": "auto", "reasoning": {"effort": "low", "summary": "detailed"}},
    {"text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"]},
    {"tools": [{"type": "web_search"}, {"type": "function", **FUNCTION, "strict": True}]},
]


@pytest.mark.parametrize("fields", RESPONSES, ids=lambda fields: ",".join(fields) or "plain")
def test_responses_keep_to_their_schema(scripted: ScriptedServer, fields: dict[str, Any]) -> None:
    body = {"input": "Hi", **fields}
    with scripted.says(SAID):
        answer = scripted.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        check("response", answer.json())
        events = scripted.events("/v1/responses", {**body, "stream": True})
    responses = [event["response"] for event in events if "response" in event]
    assert len(responses) == 3
    for response in responses:
        check("response", response)
    done = responses[-1]
    assert (done["completed_at"] is None) is (done["status"] != "completed")
    assert ("user" in done) is ("user" in fields)
    for name in ("prompt_cache_key", "safety_identifier"):
        assert done[name] == fields.get(name)
    assert done["presence_penalty"] == fields.get("presence_penalty", 0)
    assert done["store"] is False


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}])
def test_chat_completions_and_chunks_keep_to_the_published_schema(
    server: LiveServer, scripted: ScriptedServer, fields: dict[str, Any]
) -> None:
    check("chat_completion", server.post(CHAT, chat(max_tokens=5, **fields)).json())
    for chunk in server.events(CHAT, chat(max_tokens=5, stream=True, **fields))[:-1]:
        check("chat_completion_chunk", chunk)
    tools = [{"type": "function", "function": FUNCTION}]
    with scripted.says(SAID):
        check("chat_completion", scripted.post(CHAT, chat(tools=tools)).json())
        usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in scripted.events(CHAT, chat(tools=tools, **usage))[:-1]:
            check("chat_completion_chunk", chunk)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "echo": True}])
def test_completions_keep_to_their_schema(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {"prompt": "Hello", "max_tokens": 3, **fields}
    check("completion", server.post("/v1/completions", body).json())


@pytest.mark.parametrize("max_tokens", [9, 100])
def test_messages_keep_to_the_published_schema(scripted: ScriptedServer, max_tokens: int) -> None:
    tools = [{"name": "get_weather", "input_schema": CITY}]
    body: Any = {"messages": USER, "max_tokens": max_tokens, "tools": tools}
    with scripted.says(SAID):
        check("message", scripted.post("/v1/messages", body).json())
        events = scripted.events("/v1/messages", {**body, "stream": True})
    check("message", events[0]["message"])


def test_models_and_errors_have_the_published_schemas(server: LiveServer) -> None:
    for model in server.get("/v1/models").json()["data"]:
        check("model", model)
    for path in (CHAT, "/v1/completions", "/v1/responses"):
        check("openai_error", server.post(path, {}).json())
    check("openai_error", server.get("/v1/models/none").json())
    check("anthropic_error", server.post("/v1/messages", {}).json())
