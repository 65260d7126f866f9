"""Claude Code, Codex and OpenCode themselves, through `mlxinfer launch`: a turn that edits a file.

The model says what the test tells it to; requests, templates, parsers and the agents are real.
MLXINFER_AGENTS names a folder that npm installed them into. Where MLXINFER_REQUIRE_AGENTS is set, a
missing one is an error. They reach 127.0.0.1 alone, and have a home folder of their own.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedServer

from mlxinfer import hub
from mlxinfer.core import Request, TokenEvent
from mlxinfer.server.store import ResponseStore

pytestmark = pytest.mark.ci

TASK = "Change one to two in a.py."
MAX_CONTEXT = 200_000  # tokens; first prompts have 12,000 to 36,000 of the bundled tokenizer
NOWHERE = "http://127.0.0.1:9"  # a proxy that is not there
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
}


@dataclass(frozen=True)
class Agent:
    """Its arguments, and the calls that a model would answer with."""

    name: str
    arguments: tuple[str, ...]
    read: Callable[[str], dict[str, Any]]
    edit: Callable[[str], dict[str, Any]]


AGENTS = (
    Agent(
        "claude",
        ("-p", TASK, "--permission-mode", "acceptEdits"),
        lambda file: {"name": "Read", "arguments": {"file_path": file}},
        lambda file: {
            "name": "Edit",
            "arguments": {"file_path": file, "old_string": "one", "new_string": "two"},
        },
    ),
    Agent(
        "codex",
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK),
        lambda _: {"name": "exec_command", "arguments": {"cmd": "cat a.py"}},
        lambda _: {"name": "exec_command", "arguments": {"cmd": "perl -pi -e s/one/two/ a.py"}},
    ),
    Agent(
        "opencode",
        ("run", TASK),
        lambda file: {"name": "read", "arguments": {"filePath": file}},
        lambda file: {
            "name": "edit",
            "arguments": {"filePath": file, "oldString": "one", "newString": "two"},
        },
    ),
)


def programs(agent: str) -> Path:
    """The folder of an agent's program."""
    folder = Path(os.environ.get("MLXINFER_AGENTS", "/nowhere")) / "node_modules" / ".bin"
    if not (folder / agent).exists():
        if os.environ.get("MLXINFER_REQUIRE_AGENTS"):
            pytest.fail(f"{agent} is not in the folder MLXINFER_AGENTS")
        pytest.skip(f"{agent} is not in the folder MLXINFER_AGENTS")
    return folder


def long_model(folder: Path) -> str:
    """The bundled draft with room for an agent's prompt; the script computes nothing with it."""
    shutil.copytree(hub.resolve("demo-draft"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": MAX_CONTEXT})
    )
    return str(folder)


def answer_in_turns(server: ScriptedServer, answers: list[str]) -> list[str]:
    """Let the model answer by the number of calls in a prompt; returns where prompts will be.

    Requests without tools, such as for a title, are no turn.
    """
    prompts: list[str] = []
    submit = server.script.submit

    def by_turn(request: Request, deliver: Callable[[TokenEvent], None]) -> None:
        prompt = server.model.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        marks = prompt.count("<tool_call>")  # the first of them is the template's
        if marks:
            prompts.append(prompt)
        server.script.text = answers[marks - 1] if marks else "A title"
        submit(request, deliver)

    server.script.submit = by_turn  # type: ignore[method-assign]
    return prompts


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_reads_and_edits_a_file(agent: Agent, tmp_path: Path) -> None:
    """Each turn's prompt goes on from the last, and another session's begins with the same text."""
    result = programs(agent.name)
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    work, file = tmp_path / "work", tmp_path / "work" / "a.py"
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    environment = {
        "PATH": f"{result}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        **QUIET,
    }
    calls = [f"<tool_call>{json.dumps(c(str(file)))}</tool_call>" for c in (agent.read, agent.edit)]
    with ScriptedServer(bundled=long_model(tmp_path / "m"), store=ResponseStore(None)) as server:
        prompts = answer_in_turns(server, [*calls, "I am done."])
        command = [sys.executable, "-m", "mlxinfer.cli", "launch", agent.name, "--url", server.url]
        for _ in range(2):
            file.write_text("print('one')\n")
            done = subprocess.run(
                [*command, "--", *agent.arguments],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "I am done." in done.stdout
            assert file.read_text() == "print('two')\n"
    assert len(prompts) == 6
    assert all(later.startswith(prompt) for prompt, later in pairwise(prompts[:3]))
    assert prompts[3] == prompts[0]
