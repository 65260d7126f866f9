"""The page on training, command by command, on a tiny model."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli.tiny_folder import write_tiny_folder

pytestmark = pytest.mark.ci

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
MODEL = "Qwen/Qwen3-0.6B"
FEWER = {"200": "60", "1e-4": "1e-2", "8": "2"}  # steps, their size, layers: the model is tiny


def test_the_commands_of_the_page_train_answer_and_merge(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "model")
    page = PAGE.read_text()
    [line] = re.findall(r"```json\n(.*?)\n```", page)
    assert json.loads(line)["messages"][1]["role"] == "assistant"
    (tmp_path / "data").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(f"{line}\n" * 2)

    commands = [
        c for block in re.findall(r"```text\n(.*?)```", page, re.S) for c in block.split("\n")
    ]
    answers = [answer(shlex.split(command), tmp_path) for command in filter(None, commands)]
    plain, adapted, merged = answers[1], answers[2], answers[4]
    assert adapted == merged
    assert adapted != plain


def answer(command: list[str], folder: Path) -> str:
    """What a command of the page prints; of `mlxinfer run`, eight greedy tokens."""
    program, *arguments = command
    arguments = ["./model" if word == MODEL else word for word in arguments]
    if program == "mlx_lm.lora":
        arguments = ["lora", *(FEWER.get(word, word) for word in arguments)]
    if arguments[0] == "run":
        arguments += ["--temperature", "0", "--max-tokens", "8"]
    module = {"mlx_lm.lora": "mlx_lm", "mlxinfer": "mlxinfer.cli"}[program]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
