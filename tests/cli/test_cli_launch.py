"""`mlxinfer launch`: agents get the address, key and model of a server."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.cli import running as launch


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> Any:
        return {"data": [{"id": "chat"}, {"id": "small"}]}

    monkeypatch.setattr(launch, "ask", ask)
    monkeypatch.setattr(launch, "default_url", lambda: "http://127.0.0.1:8080")
    monkeypatch.setenv("MLXINFER_API_KEY", "sk-1")


def test_launch_starts_a_tool_with_the_server_as_its_model(
    server: None, outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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


@pytest.mark.parametrize("tool", list(launch.TOOLS))
def test_launch_prints_commands_that_a_shell_takes(tool: str, server: None, outcome: Any) -> None:
    seen = outcome("launch", tool, "--print", "--", "--verbose")
    *exports, last = seen.out.splitlines()
    assert all(line.startswith("export ") for line in exports)
    assert last.startswith(tool)
    assert last.endswith("--verbose")
    assert "http://127.0.0.1:8080" in seen.out
    assert "chat" in seen.out
    assert subprocess.run(["sh", "-n", "-c", seen.out], check=False).returncode == 0


def test_launch_says_what_is_missing(
    server: None, outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "aider is not installed: pip install aider-chat" in outcome("launch", "aider").err
    assert "it has chat, small" in outcome("launch", "aider", "-m", "none").err
