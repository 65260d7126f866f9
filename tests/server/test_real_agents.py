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
import threading
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
CODEX_CONTEXT = 17_000  # tokens; its first prompt has 16,000 of the bundled tokenizer
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


def long_model(folder: Path, max_context: int = MAX_CONTEXT) -> str:
    """The bundled draft with room for an agent's prompt; the script computes nothing with it."""
    shutil.copytree(hub.resolve("demo-draft"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": max_context})
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


class Workplace:
    """A home of its own and a repository with one file."""

    def __init__(self, folder: Path) -> None:
        self.home, self.work = folder / "home", folder / "work"
        self.file = self.work / "a.py"
        for place in (self.home, self.work):
            place.mkdir()
        subprocess.run(["git", "init", "-q"], cwd=self.work, check=True)

    def run(self, server: ScriptedServer, agent: str, *arguments: str) -> str:
        """Start an agent through `launch`; returns what it says, which ends with "I am done."."""
        self.file.write_text("print('one')\n")
        launch = [sys.executable, "-m", "mlxinfer.cli", "launch", agent, "--url", server.url]
        path = f"{programs(agent)}:{os.environ['PATH']}"
        done = subprocess.run(
            [*launch, "--", *arguments],
            cwd=self.work,
            env={**QUIET, "PATH": path, "HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "I am done." in done.stdout
        return done.stdout + done.stderr


@pytest.mark.alike
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_reads_and_edits_a_file(agent: Agent, tmp_path: Path) -> None:
    """Each turn's prompt goes on from the last, and another session's begins with the same text."""
    programs(agent.name)
    place = Workplace(tmp_path)
    calls = [
        f"<tool_call>{json.dumps(c(str(place.file)))}</tool_call>" for c in (agent.read, agent.edit)
    ]
    with ScriptedServer(bundled=long_model(tmp_path / "m"), store=ResponseStore(None)) as server:
        prompts = answer_in_turns(server, [*calls, "I am done."])
        for _ in range(2):
            place.run(server, agent.name, *agent.arguments)
            assert place.file.read_text() == "print('two')\n"
    assert len(prompts) == 6
    assert all(later.startswith(prompt) for prompt, later in pairwise(prompts[:3]))
    assert prompts[3] == prompts[0]


def test_codex_compacts_before_its_window_is_full(tmp_path: Path) -> None:
    """`launch` tells it the model's context; it makes a summary at nine tenths of that."""
    programs("codex")
    read = json.dumps(AGENTS[1].read(""))
    answers = (f"<tool_call>{read}</tool_call>", "A summary.", "I am done.")
    model = long_model(tmp_path / "m", CODEX_CONTEXT)
    with (
        ScriptedServer(bundled=model, store=ResponseStore(None)) as server,
        server.says_in_turn(*answers) as prompts,
    ):
        Workplace(tmp_path).run(server, "codex", *AGENTS[1].arguments)
    assert "A summary." in prompts[2]


def test_an_idle_timeout_of_codex_is_shorter_than_a_long_prompt(tmp_path: Path) -> None:
    """The events of a silence are such as it counts."""
    programs("codex")
    limits = ("stream_idle_timeout_ms=1500", "stream_max_retries=0")
    flags = [part for limit in limits for part in ("-c", f"model_providers.mlxinfer.{limit}")]
    model = long_model(tmp_path / "m")
    with ScriptedServer(bundled=model, store=ResponseStore(None), keep_alive_s=0.2) as server:
        submit = server.script.submit

        def late(request: Request, deliver: Callable[[TokenEvent], None]) -> None:
            threading.Timer(3.0, submit, (request, deliver)).start()

        server.script.submit = late  # type: ignore[method-assign]
        with server.says("I am done."):
            Workplace(tmp_path).run(server, "codex", *flags, *AGENTS[1].arguments)
