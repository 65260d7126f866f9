"""suggest, launch, completion, config init, list: what stands around the models."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxinfer.cli import launch
from mlxinfer.cli._commands import cli
from mlxinfer.cli.suggest import TASKS, suggestions
from mlxinfer.configfile import read_config_file


def test_suggestions_fit_the_memory_and_say_how_to_get_them(outcome: Any) -> None:
    found = json.loads(outcome("suggest", "--memory", "24GB", "--json").out)
    sizes = [model["weights_bytes"] for model in found["models"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size < found["limit_bytes"] for size in sizes)
    assert found["models"][0]["get"] == f"mlxinfer pull {found['models'][0]['name']}"
    larger = json.loads(outcome("suggest", "--memory", "96GB", "--json").out)["models"]
    assert len(larger) > len(found["models"])
    code = json.loads(outcome("suggest", "--memory", "96GB", "--for", "code", "--json").out)
    assert {"code"} == {"code"}.intersection(*[model["tasks"] for model in code["models"]])
    assert outcome("suggest", "--memory", "100MB").code == 1


def test_the_table_of_suggestions_has_sources_and_known_tasks() -> None:
    for each in suggestions():
        assert each.source.startswith("https://huggingface.co/")
        assert set(each.tasks) <= set(TASKS)
        assert each.bytes_at(8192) > each.bytes


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_command(shell: str, outcome: Any) -> None:
    seen = outcome("completion", shell)
    assert seen.code == 0
    assert f"_MLXINFER_COMPLETE={shell}_complete" in seen.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mlxinfer run -m de", ["demo", "demo-draft"]),
        ("mlxinfer show demo-", ["demo-draft"]),
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


def test_config_init_writes_a_file_that_holds(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "new" / "config.toml"
    monkeypatch.setenv("MLXINFER_CONFIG", str(place))
    assert outcome("config", "init").out.strip() == str(place)
    assert list(read_config_file(place).models) == ["demo"]
    assert outcome("config", "init").code == 2
    place.write_text("changed")
    assert outcome("config", "init", "--force").code == 0
    plain = place.read_text()
    options = [line.removeprefix("# ") for line in plain.splitlines() if " = " in line]
    place.write_text("\n".join(["[serve]", *[o for o in options if o.startswith(SERVE)]]))
    assert outcome("config", "show").code == 0


SERVE = ("port", "host", "max-memory", "ttl")


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


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + struct.pack("<I", 3))
    return path


def test_models_of_lm_studio_ollama_and_other_folders_are_listed(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    studio, own = tmp_path / ".lmstudio/models/mlx-community/Tiny", tmp_path / "disk/Other"
    for folder in (studio, own):
        folder.mkdir(parents=True)
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / file).write_text("{}")
    gguf(tmp_path / ".lmstudio/models/org/Big/big-00001-of-00002.gguf")
    gguf(tmp_path / ".lmstudio/models/org/Big/big-00002-of-00002.gguf")
    blob = gguf(tmp_path / ".ollama/models/blobs/sha256-ab")
    manifest = tmp_path / ".ollama/models/manifests/registry.ollama.ai/library/llama/8b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}
    manifest.write_text(json.dumps({"layers": [{"mediaType": "other"}, layer]}))
    seen = json.loads(outcome("list", "--folder", str(tmp_path / "disk"), "--json").out)
    found = {m["name"]: m["source"] for m in seen["models"] if m["source"] != "bundled"}
    assert found == {str(own): "folder", str(studio): "lm studio"}
    assert [m["name"] for m in seen["gguf"]] == ["org/Big/big-00001-of-00002.gguf", "llama:8b"]
    assert seen["gguf"][1]["convert"] == f"mlxinfer convert {blob} llama-8b"
    shown = outcome("list").out
    assert "~/.lmstudio/models/mlx-community/Tiny" in shown
    assert "GGUF, ollama" in shown
    monkeypatch.setenv("MLXINFER_MODELS", os.pathsep.join([str(tmp_path / "disk"), "/none"]))
    assert "~/disk/Other" in outcome("list").out


@pytest.mark.skipif(sys.platform == "win32", reason="no sh")
def test_a_blob_of_ollama_is_read_as_gguf(outcome: Any, tmp_path: Path) -> None:
    seen = outcome("convert", str(gguf(tmp_path / "sha256-ab")), str(tmp_path / "out"), "--dry-run")
    assert seen.code == 1
    assert "GGUF" in seen.err or "truncated" in seen.err
    assert "is a file; expected" not in seen.err
