"""mlxinfer ps, load, unload: a real server, no server, another program; launch: coding agents."""

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from lazy_server import LazyServer
from live_server import LiveServer, chat

from mlxinfer import LLM
from mlxinfer.cli import running
from mlxinfer.cli.running import duration, state_of
from mlxinfer.errors import ServerError
from mlxinfer.memory import human_bytes
from mlxinfer.server.keys import ApiKeys
from tests.http_site import Reply, http_site

pytestmark = pytest.mark.demo  # `small` must be another model than `demo`

TLS = Path(__file__).parents[1] / "server" / "tls"


@pytest.fixture(scope="module")
def server() -> Iterator[LazyServer]:
    """Two models, none of them loaded, behind a key."""
    fields: dict[str, dict[str, Any]] = {"big": {"ttl_s": 1800.0}, "small": {"aliases": ("tiny",)}}
    with LazyServer(fields=fields, keys=ApiKeys.from_plain(["right"])) as server:
        yield server


@pytest.fixture
def ask(server: LazyServer, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """ask("ps") with the key, at the server's address."""
    monkeypatch.setenv("MLXINFER_API_KEY", "right")
    return lambda *args: outcome(*args, "--url", server.url)


def test_loaded_models_are_listed_until_they_are_unloaded(ask: Any) -> None:
    assert ask("load", "tiny").out.startswith("small is loaded: ")
    assert ask("load", "big").code == 0
    lines = [line.split() for line in ask("ps").out.splitlines()]
    assert lines[0][:2] == ["NAME", "STATE"]
    assert [line[:2] for line in lines[1:]] == [["big", "loaded"], ["small", "loaded"]]
    assert lines[1][-2:] == ["30m", "0s"]
    assert lines[1][5] == "B"  # "0 B of 20.1 MB"
    assert lines[1][6] == "of"
    assert lines[2][-1] == "-"
    assert ask("unload", "tiny", "--drain", "1").out == "small is unloaded\n"
    shown = json.loads(ask("ps", "--json").out)
    assert [m["state"] for m in shown["models"]] == ["loaded", "unloaded"]
    used = human_bytes(shown["models"][0]["weights_bytes"])  # and no KV cache yet
    assert ask("ps").err == f"{used} in use of 100 MB for models\n"
    assert 0 < shown["memory_reserved_bytes"] < shown["memory_limit_bytes"]
    assert json.loads(ask("unload", "big", "--json").out)["state"] == "unloaded"


def test_what_the_server_refuses_is_one_line(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ask("load", "none")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: There is no model 'none' here; there is: big, small.\n"
    monkeypatch.setenv("MLXINFER_API_KEY", "wrong")
    assert "MLXINFER_API_KEY" in ask("ps").err
    monkeypatch.delenv("MLXINFER_API_KEY")
    assert ask("ps").err.count("\n") == 1


def test_the_address_is_that_of_serve(
    server: LazyServer, outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[serve]\nport = {server.port}\nhost = "0.0.0.0"\ninsecure = true\n')
    monkeypatch.setenv("MLXINFER_CONFIG", str(config))
    monkeypatch.setenv("MLXINFER_API_KEY", "right")
    assert outcome("ps").code == 0
    monkeypatch.setenv("MLXINFER_SERVE_PORT", "1")
    assert "http://127.0.0.1:1:" in outcome("ps").err


def test_no_server_is_one_line(outcome: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        ended = outcome("ps", "--url", url + "/v1")
    assert ended.code == 1
    assert ended.err.startswith(f"error: No server answers at {url}: Connection refused.")
    assert ended.err.count("\n") == 1
    assert "mlxinfer serve" in ended.err


@pytest.mark.parametrize(
    ("status", "headers"), [(200, {}), (404, {}), (302, {"location": "/stolen"})]
)
def test_another_program_there_is_recognised(
    outcome: Any, status: int, headers: dict[str, str]
) -> None:
    """It answers, or sends the key elsewhere."""
    seen: list[str] = []

    def reply(path: str) -> Reply:
        seen.append(path)
        return status, headers, [b"hi"]

    with http_site(reply) as url:
        ended = outcome("ps", "--url", url)
    assert ended.code == 1
    assert "is no mlxinfer server" in ended.err
    assert seen == ["/admin/models"]


def test_durations_are_written_in_their_two_largest_units() -> None:
    for seconds, text in {
        **{None: "-", 0.2: "0s", 59: "59s", 60: "1m 0s", 3599.9: "1h 0m", 7260: "2h 1m"}
    }.items():
        assert duration(seconds) == text


def test_a_named_certificate_is_trusted(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    with http_site(lambda _: (404, {}, [b"hi"]), context) as url:
        refused = outcome("ps", "--url", url).err
        assert "self-signed certificate. If the server is yours, set SSL_CERT_FILE" in refused
        with pytest.raises(ServerError, match="set SSL_CERT_FILE"):
            LLM(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
        assert "is no mlxinfer server" in outcome("ps", "--url", url).err
        with pytest.raises(ServerError, match="404"):
            LLM(url)


def test_a_model_that_cannot_be_loaded_says_when_it_is_tried_again() -> None:
    model = {"state": "unloaded", "failure": "broken", "retry_left_s": 75.0}
    assert state_of(model) == "failed, again in 1m 15s"
    assert state_of({**model, "retry_left_s": 0.0}) == "failed"
    assert state_of({**model, "state": "loading"}) == "loading"
    assert state_of({**model, "failure": None}) == "unloaded"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with two models: `chat` is loaded and thinks, `small` is loaded when asked for."""
    chat_model = {"max_model_len": 4096, "capabilities": {"reasoning": True, "vision": True}}
    cards: dict[str, Any] = {
        "chat": {"id": "chat", "parent": None, **chat_model},
        "small": {"id": "small", "parent": None, "max_model_len": None, "capabilities": None},
    }

    def ask(_: object, path: str, body: Any = None, **__: object) -> Any:
        if path == "/api/show":
            able = {"reasoning": False, "vision": False}
            cards[body["model"]] |= {"max_model_len": 512, "capabilities": able}
        if path == "/v1/models":
            return {"data": list(cards.values())}
        return cards.get(path.rpartition("/")[2])

    monkeypatch.setattr(running, "ask", ask)
    monkeypatch.setattr(running, "default_url", lambda: "http://127.0.0.1:8080")
    monkeypatch.setenv("MLXINFER_API_KEY", "sk-1")


def test_launch_starts_a_tool_with_the_server_as_its_model(
    served: None, outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL" "$@"\n')
    program.chmod(0o755)
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *args: started.append(args))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert outcome("launch", "claude", "-m", "small", "--", "-p", "hi").code == 0
    path, words, environment = started[0]
    done = subprocess.run([path, *words[1:]], env=environment, capture_output=True, text=True)
    assert done.stdout == "http://127.0.0.1:8080 small -p hi\n"
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "sk-1"


@pytest.mark.parametrize("tool", list(running.TOOLS))
def test_launch_prints_commands_that_a_shell_takes(tool: str, served: None, outcome: Any) -> None:
    seen = outcome("launch", tool, "--print", "--", "--verbose")
    *exports, last = seen.out.splitlines()
    assert all(line.startswith("export ") for line in exports)
    assert last.startswith(tool)
    assert last.endswith("--verbose")
    assert "http://127.0.0.1:8080" in seen.out
    assert "chat" in seen.out
    assert subprocess.run(["sh", "-n", "-c", seen.out], check=False).returncode == 0


def test_launch_says_what_is_missing(
    served: None, outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "aider is not installed: pip install aider-chat" in outcome("launch", "aider").err
    assert "it has chat, small" in outcome("launch", "aider", "-m", "none").err


@pytest.mark.parametrize(
    ("tool", "chat", "small"),
    [
        (
            "claude",
            {
                "MAX_CONTEXT_TOKENS=4096",
                "AUTO_COMPACT_WINDOW=4096",
                "OPUS_MODEL_SUPPORTED"
                "_CAPABILITIES=temperature,thinking,interleaved_thinking,effort,xhigh",
            },
            {"MAX_CONTEXT_TOKENS=512", "SONNET_MODEL_SUPPORTED_CAPABILITIES=temperature\n"},
        ),
        (
            "codex",
            {"model_context_window=4096", "model_supports_reasoning_summaries=true"},
            {"model_context_window=512"},
        ),
        (
            "opencode",
            {
                '"limit": {"context": 4096, "output": 1024}',
                '"reasoning": true',
                '"input": ["text", "image"]',
            },
            {'"limit": {"context": 512, "output": 128}', '"reasoning": false', '"input": ["text"]'},
        ),
    ],
)
def test_launch_tells_agents_what_the_model_can(
    tool: str, chat: set[str], small: set[str], served: None, outcome: Any
) -> None:
    known = outcome("launch", tool, "-m", "chat", "--print").out
    assert {words for words in chat if words not in known} == set()
    seen = outcome("launch", tool, "-m", "small", "--print")  # it is loaded first
    assert {words for words in small if words not in seen.out} == set()
    assert not chat & {words for words in chat if words in seen.out}
    assert "the server loads small" in seen.err


def test_each_tier_of_claude_code_is_a_model_of_the_server(served: None, outcome: Any) -> None:
    printed = outcome("launch", "claude", "-m", "small", "--print").out
    tiers = re.findall(r"ANTHROPIC_DEFAULT_(\w+)_MODEL=small$", printed, re.MULTILINE)
    assert sorted(tiers) == ["FABLE", "HAIKU", "OPUS", "SONNET"]
    assert "export CLAUDE_CODE_ATTRIBUTION_HEADER=0" in printed


def test_why_says_where_reuse_ended(outcome: Any) -> None:
    with LiveServer() as server:

        def ask(text: str) -> str:
            body = chat("Some words that stay the same in each question. " * 4 + text)
            return str(server.post("/v1/chat/completions", body).json()["id"])

        first, second = ask("Zebras run."), ask("Lions sleep.")
        lines = outcome("why", "--url", server.url).out.splitlines()
        assert "text_differs at" in lines[1]
        assert first.endswith(lines[2].split()[2])
        shown = outcome.json("why", second, "--url", server.url)
        told = outcome("why", second, "--url", server.url).out
        assert f"from token {shown['differs_at']} on:" in told
        assert shown["text"].split()[0] in told
        missing = outcome("why", "nothing", "--url", server.url)
        assert missing.code == 1
        assert "No such request" in missing.err
