"""The Tab key: the scripts, the words that they ask for, and the shells themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("shell", list(ASK))
def test_a_shell_completes_the_name_of_a_model(shell: str, environment: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here: install it with the system's packages")
    done = subprocess.run(
        [shell, "-c", ASK[shell]], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["demo-draft"], done.stderr


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
