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
from typing import Any

import pytest
from live_server import CHAT
from scripted import ScriptedServer

from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.store import ResponseStore

SHELL: Any = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
    "additionalProperties": False,
}
GRAMMAR = (
    'start: "*** Begin Patch" LF line+ "*** End Patch"\nline: /[^*\\n]+/ LF\n%import common.LF'
)


def codex_said(role: str, text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": role,
        "content": [{"type": "input_text", "text": text}],
    }


CODEX: Any = {
    "model": "gpt-5.5-codex",
    "instructions": "You are Codex, a coding agent.",
    "input": [
        codex_said("developer", "<permissions>read only</permissions>"),
        codex_said("user", "<environment_context>/a</environment_context>"),
        codex_said("user", "List the files."),
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "aG0="},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "call_id": "call_1",
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": '{"output":"a.py","metadata":{"exit_code":0}}',
        },
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": SHELL,
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "auto",
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
CLAUDE: Any = {
    "model": "claude-opus-4-9",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "You are Claude Code.", **CACHED},
        {"type": "text", "text": "Be concise.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                {"type": "text", "text": "Read a.py", **CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read.", "signature": "c2ln"},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "1 print()"}],
                    **CACHED,
                }
            ],
        },
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"file_path": {"type": "string"}},
                "required": ["file_path"],
                "additionalProperties": False,
            },
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"budget_tokens": 1024, "type": "enabled"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "stream": True,
}
CONTINUE_CHAT: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Explain."}]}],
    "max_tokens": 4096,
    "stream": True,
    "stop": None,
    "parallel_tool_calls": False,
    "stream_options": {"include_usage": True},
}
CONTINUE_TAB: Any = {
    "model": "demo",
    "prompt": "<fim_prefix>def f():\n    <fim_suffix>\n<fim_middle>",
    "max_tokens": 64,
    "temperature": 0.01,
    "stream": True,
    "stop": [
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "<file_sep>"),
        *("/src/", "#- coding: utf-8", "```", "\n\n", "t.", "\nfunction", "\nclass", "\nimport"),
    ],
}
AIDER: Any = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "Act as an expert developer."},
        {"role": "user", "content": "I added a.py"},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Change it."},
        {"role": "system", "content": "Use SEARCH/REPLACE blocks."},
    ],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "extra_body": {},
}
OPEN_WEBUI: Any = {
    "stream": True,
    "model": "demo",
    "messages": [{"role": "user", "content": "Hi"}],
    "params": {},
    "stream_options": {"include_usage": True},
    "session_id": "s",
    "chat_id": "c",
    "id": "m",
    "background_tasks": {"title_generation": True},
    "features": {"web_search": False},
    "variables": {"{{USER_NAME}}": "A"},
}


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


def test_codex(server: ScriptedServer) -> None:
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
def test_claude_code(server: ScriptedServer, thinking: Any) -> None:
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
    found = server.post("/v1/messages/count_tokens?beta=true", counted, headers=headers)
    assert found.json()["input_tokens"] > 50


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, CONTINUE_CHAT, "It adds."),
        ("/v1/completions", CONTINUE_TAB, "return 1"),
        (CHAT, AIDER, "a.py\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE"),
        (CHAT, OPEN_WEBUI, "Hello"),
        ("/chat/completions", OPEN_WEBUI, "Hello"),
    ],
    ids=["continue", "continue-tab", "aider", "open-webui", "open-webui without /v1"],
)
def test_editors_and_pages(server: ScriptedServer, path: str, body: Any, said: str) -> None:
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
        "model": model["model"],
        "messages": [{"role": "user", "content": "Hi"}],
        "options": {},
        "stream": True,
        "metadata": {"chat_id": "c"},
    }
    with server.says("Hello"):
        lines = server.post("/api/chat", body).text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "Hello"
    assert json.loads(lines[-1])["done"]
