"""The Tab key: the scripts, the words that they ask for, and the shells themselves."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxinfer.cli._commands import cli

ASK = {
    "bash": (
        "source <(mlxinfer completion bash); COMP_WORDS=(mlxinfer run -m demo-d); COMP_CWORD=3; "
        '_mlxinfer_completion mlxinfer demo-d -m; echo "${COMPREPLY[@]}"'
    ),
    "fish": 'mlxinfer completion fish | source; complete -C "mlxinfer run -m demo-d"',
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """This installation's commands first, and no models but the bundled ones."""
    bin_folder = str(Path(sys.executable).parent)
    home = {"HF_HOME": str(tmp_path), "HOME": str(tmp_path), "TERM": "xterm"}
    return {**os.environ, **home, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}


def require(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here: install it with the system's packages")


@pytest.mark.parametrize("shell", list(ASK))
def test_a_shell_completes_the_name_of_a_model(shell: str, environment: dict[str, str]) -> None:
    require(shell)
    done = subprocess.run(
        [shell, "-c", ASK[shell]], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["demo-draft"], done.stderr


def test_zsh_completes_the_name_of_a_model_at_the_tab_key(environment: dict[str, str]) -> None:
    require("zsh")
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        ["zsh", "-f", "-i"],
        env=environment,
        start_new_session=True,
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)

    def read_until(text: bytes) -> bytes:
        seen, until_s = b"", time.monotonic() + 60
        while text not in seen and time.monotonic() < until_s:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096)
        return seen

    try:
        begin = (
            "PROMPT=; autoload -Uz compinit && compinit -u -D; source <(mlxinfer completion zsh)"
        )
        os.write(terminal, f"{begin}; echo re''ady\n".encode())
        assert b"ready" in read_until(b"ready")
        os.write(terminal, b"mlxinfer run -m demo-d\t")
        assert b"mlxinfer run -m demo-draft" in read_until(b"demo-draft")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_command(shell: str, outcome: Any) -> None:
    seen = outcome("completion", shell)
    assert seen.code == 0
    assert f"_MLXINFER_COMPLETE={shell}_complete" in seen.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mlxinfer run -m de", ["demo", "demo-vision", "demo-draft"]),
        ("mlxinfer show demo-", ["demo-vision", "demo-draft"]),
        ("mlxinfer sug", ["suggest"]),
        ("mlxinfer run --no-thi", ["--no-think"]),
    ],
)
def test_tab_completes_models_commands_and_options(
    words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    asked["_MLXINFER_COMPLETE"] = "bash_complete"
    seen = CliRunner().invoke(cli, [], prog_name="mlxinfer", env=asked)
    assert [line.partition(",")[2] for line in seen.output.splitlines()] == expected
