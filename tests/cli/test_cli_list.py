"""`mlxinfer suggest` and `mlxinfer list`: models to have, and those on this disk."""

import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.hub.cache import ASSETS, WHOLE
from mlxinfer.memory.suggestions import TASKS, suggestions


def test_suggestions_fit_the_memory_and_say_how_to_get_them(outcome: Any) -> None:
    content = outcome.json("suggest", "--memory", "24GB")
    sizes = [model["weights_bytes"] for model in content["models"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size < content["limit_bytes"] for size in sizes)
    assert content["models"][0]["get"] == f"mlxinfer pull {content['models'][0]['name']}"
    larger = outcome.json("suggest", "--memory", "96GB")["models"]
    assert len(larger) > len(content["models"])
    code = outcome.json("suggest", "--memory", "96GB", "--for", "code")
    assert {"code"} == {"code"}.intersection(*[model["tasks"] for model in code["models"]])
    [pick] = [model["name"] for model in content["models"] if model["pick"]]
    assert pick == "mlx-community/gpt-oss-20b-MXFP4-Q8"  # the largest leaves no room
    assert f"Best balance of quality and room: {pick}" in outcome("suggest", "--memory", "24GB").out
    assert outcome("suggest", "--memory", "100MB").code == 1


def test_the_readme_names_what_is_suggested_and_dense_giants_come_late(outcome: Any) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) GB.* \| `(.*)` \| ([\d.]+) GB \|$", readme, re.MULTILINE)
    assert len(rows) > 4
    for memory, name, size in rows:
        models = outcome.json("suggest", "--memory", f"{memory}GB")["models"]
        [pick] = [model for model in models if model["pick"]]
        assert (pick["name"], f"{pick['weights_bytes'] / 1e9:.1f}") == (name, size), memory
        assert pick["weights_bytes"] * pick["active_parameters"] / pick["parameters"] < 6e9
    for task in TASKS:
        suggested = outcome.json("suggest", "--memory", "64GB", "--for", task)
        assert all(task in model["tasks"] for model in suggested["models"])


def test_the_table_of_suggestions_has_sources_and_known_tasks() -> None:
    for suggestion in suggestions():
        assert suggestion.source.startswith("https://huggingface.co/")
        assert set(suggestion.tasks) <= set(TASKS)
        assert suggestion.bytes_at(8192) > suggestion.bytes


def test_a_model_has_the_same_size_in_all_commands(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    name = "mlx-community/Qwen3-0.6B-4bit"
    here = tmp_path / f"models--{name.replace('/', '--')}"
    weights = Path(shutil.copytree(ASSETS / "demo-draft", here / "snapshots/c")) / WHOLE
    (here / "refs").mkdir()
    (here / "refs/main").write_text("c")
    listed = outcome.json("list")["models"]
    suggested = outcome.json("suggest", "--memory", "24GB")["models"]
    sizes = [model["size_bytes"] for model in listed if model["name"] == name]
    sizes += [model["weights_bytes"] for model in suggested if model["name"] == name]
    sizes += [outcome.json("show", name)["weight_bytes"]]
    assert sizes == [weights.stat().st_size] * 3


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + struct.pack("<I", 3))
    return path


def test_models_of_lm_studio_ollama_and_other_folders_are_listed(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    studio, folder_of_user = (
        tmp_path / ".lmstudio/models/mlx-community/My Tiny",
        tmp_path / "disk/Other",
    )
    for folder in (studio, folder_of_user):
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
    seen = outcome.json("list", "--folder", str(tmp_path / "disk"))
    by_name = {m["name"]: m["source"] for m in seen["models"] if m["source"] != "bundled"}
    assert by_name == {str(folder_of_user): "folder", str(studio): "lm studio"}
    assert [m["name"] for m in seen["gguf"]] == ["org/Big/big-00001-of-00002.gguf", "llama:8b"]
    assert seen["gguf"][1]["convert"] == f"mlxinfer convert {blob} llama-8b"
    shown = outcome("list").out
    assert "~/'.lmstudio/models/mlx-community/My Tiny' " in shown  # as a shell reads it
    assert "GGUF, ollama" in shown
    monkeypatch.setenv("MLXINFER_MODELS", os.pathsep.join([str(tmp_path / "disk"), "/none"]))
    assert "~/disk/Other" in outcome("list").out


@pytest.mark.skipif(sys.platform == "win32", reason="no sh")
def test_a_blob_of_ollama_is_read_as_gguf(outcome: Any, tmp_path: Path) -> None:
    seen = outcome("convert", str(gguf(tmp_path / "sha256-ab")), str(tmp_path / "out"), "--dry-run")
    assert seen.code == 1
    assert "GGUF" in seen.err or "truncated" in seen.err
    assert "is a file; expected" not in seen.err


@pytest.mark.parametrize(
    ("config", "why"),
    [("{", "config.json is no JSON object"), ("[]", "config.json is no JSON object")],
)
def test_a_model_that_cannot_be_read_is_listed_with_the_reason(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str, why: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    here = tmp_path / "models--org--broken"
    shutil.copytree(ASSETS / "demo-draft", here / "snapshots/c")
    (here / "refs").mkdir()
    (here / "refs/main").write_text("c")
    (here / "snapshots/c/config.json").write_text(config)
    elsewhere = tmp_path / "folder/model"
    shutil.copytree(here / "snapshots/c", elsewhere)
    result = outcome("list", "--folder", str(elsewhere.parent), "--json").out
    broken = [model for model in json.loads(result)["models"] if model.get("problem")]
    assert [model["name"] for model in broken] == ["org/broken", str(elsewhere)]
    assert {model["problem"] for model in broken} == {why}
    assert f"cannot be read: {why}" in outcome("list").out
