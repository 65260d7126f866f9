"""Requests of agents and editors, replayed: written from their public sources, in short.

Codex: `ResponsesRequest` in codex-rs/codex-api and the tools of codex-rs/core (openai/codex).
Claude Code: its requests as proxies log them (anthropics/claude-code issue 7351;
experientiallabs/experiential pull request 905; chand1012/claude-code-mlx-proxy issue 3).
Continue: core/llm/llms and the FIM templates of core/autocomplete (continuedev/continue).
aider: what litellm sends for `aider/sendchat.py`, with streamed usage (Aider-AI/aider).
Open WebUI: backend/open_webui/routers/openai.py and routers/ollama.py (open-webui/open-webui).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from live_server import CHAT
from scripted import ScriptedServer

from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.store import ResponseStore

REQUESTS: Any = yaml.load(Path(__file__).with_name("agents.yml").read_text(), yaml.CSafeLoader)
CODEX, CLAUDE = REQUESTS["codex"], REQUESTS["claude"]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    """As `mlxinfer serve --default-model demo` has it."""
    with ScriptedServer(store=ResponseStore(None)) as server:
        models: ModelRegistry = server.service.models
        models._default = models.find("demo")
        yield server


def data_of(server: ScriptedServer, path: str, body: Any, headers: dict[str, str]) -> list[Any]:
    """The data of the events of a stream."""
    answer = server.post(path, body, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_codex_gets_its_tool_call_over_the_responses_api(server: ScriptedServer) -> None:
    call = '<tool_call>{"name": "shell", "arguments": {"command": ["cat", "a.py"]}}</tool_call>'
    headers = {"originator": "codex_cli_rs", "session_id": "1", "accept": "text/event-stream"}
    with server.says(f"<think>I look.</think>{call}"):
        events = data_of(server, "/v1/responses", CODEX, headers)
        assert "a.py" in server.prompt
        assert "web_search" not in server.prompt
    last = events[-1]
    assert last["type"] == "response.completed"
    kinds = [item["type"] for item in last["response"]["output"]]
    assert kinds == ["reasoning", "function_call"]
    assert last["response"]["output"][0]["encrypted_content"]
    assert json.loads(last["response"]["output"][1]["arguments"]) == {"command": ["cat", "a.py"]}
    follow = {**CODEX, "input": [*CODEX["input"], *last["response"]["output"]], "stream": False}
    follow["input"].append(
        {
            "type": "function_call_output",
            "call_id": kinds and last["response"]["output"][1]["call_id"],
            "output": [{"type": "input_text", "text": "print()"}],
        }
    )
    with server.says("Done."):
        assert server.post("/v1/responses", follow, headers=headers).status_code == 200
        assert "print()" in server.prompt


@pytest.mark.parametrize(
    "thinking",
    [CLAUDE["thinking"], {"type": "enabled"}, {"type": "adaptive"}, {"type": "disabled"}],
)
def test_claude_code_gets_thought_text_and_call(server: ScriptedServer, thinking: Any) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "user-agent": "claude-cli/2.3.0 (external, cli)",
        "x-app": "cli",
    }
    call = '<tool_call>{"name": "Read", "arguments": {"file_path": "/b"}}</tool_call>'
    body = {**CLAUDE, "thinking": thinking}
    with server.says(f"I read on.{call}"):
        events = data_of(server, "/v1/messages?beta=true", body, headers)
        assert "1 print()" in server.prompt
    assert events[0]["type"] == "message_start"
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    (end,) = [e for e in events if e["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "tool_use"
    counted = {key: CLAUDE[key] for key in ("model", "system", "messages", "tools")}
    reply = server.post("/v1/messages/count_tokens?beta=true", counted, headers=headers)
    assert reply.json()["input_tokens"] > 50


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        (CHAT, "continue_chat", "It adds."),
        ("/v1/completions", "continue_tab", "return 1"),
        (CHAT, "aider", "a.py\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE"),
        (CHAT, "open_webui", "Hello"),
        ("/chat/completions", "open_webui", "Hello"),
    ],
    ids=["continue", "continue-tab", "aider", "open-webui", "open-webui without /v1"],
)
def test_requests_of_editors_stream_the_text_and_usage_if_asked(
    server: ScriptedServer, path: str, kind: str, said: str
) -> None:
    body = REQUESTS[kind]
    with server.says(said):
        events = data_of(server, path, body, {"authorization": "Bearer none"})
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)
    assert text == said
    wants_usage = "stream_options" in body
    assert bool(events[-2].get("usage")) is wants_usage


def test_open_webui_over_ollama(server: ScriptedServer) -> None:
    assert server.get("/api/version").json()["version"]
    (model,) = server.get("/api/tags").json()["models"]
    assert server.get("/api/ps").json()["models"]
    body = {
        "model": model["model"], "messages": [{"role": "user", "content": "Hi"}], "options": {},
        "stream": True, "metadata": {"chat_id": "c"},
    }  # fmt: skip
    with server.says("Hello"):
        lines = server.post("/api/chat", body).text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "Hello"
    assert json.loads(lines[-1])["done"]
