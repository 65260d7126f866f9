"""pull, list, show, rm against the stand-in hub."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from models import tiny
from models.test_qwen4_exp import WIDE, tensors_of
from speculation.head_checkpoints import mtp_checkpoint
from standin import Repo, StandIn
from standin_fixtures import MODEL, WEIGHTS

from mlxinfer import InsufficientMemoryError, hub
from mlxinfer.hub import cache as hub_cache
from mlxinfer.memory.fit import held_bytes
from tests.tables import words

WEIGHTS_FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def no_bundled_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for module in (hub, hub_cache):
        monkeypatch.setattr(module, "ASSETS", tmp_path / "assets")


def test_pull_then_list_then_rm(standin: StandIn, outcome: Any) -> None:
    pulled = outcome("pull", "org/tiny")
    assert pulled.code == 0
    assert pulled.out.startswith("org/tiny is in ")
    assert pulled.err == ""
    listed = outcome("list").out.splitlines()
    assert listed[0].split() == ["NAME", "SIZE", "MODIFIED", "STATE"]
    assert listed[1].startswith("org/tiny  262 kB")
    assert listed[1].endswith("ready")
    assert outcome("rm", "--yes", "org/tiny").out.startswith("Deleted org/tiny, 264 kB freed")
    assert len(outcome("list").out.splitlines()) == 1


def test_json_keys_are_stable(standin: StandIn, outcome: Any) -> None:
    plan = outcome.json("pull", "--dry-run", "org/tiny")
    assert set(plan) == set(words("name commit total_bytes missing_bytes free_bytes fit files"))
    assert plan["fit"]["weights_bytes"] == len(WEIGHTS)
    assert plan["missing_bytes"] == plan["total_bytes"]
    pulled = outcome.json("pull", "org/tiny")
    assert set(pulled) == {"name", "path", "size_bytes"}
    [model] = outcome.json("list")["models"]
    assert set(model) == {"name", "path", "size_bytes", "files", "modified", "complete", "source"}
    assert model["path"] == pulled["path"]
    assert model["size_bytes"] == pulled["size_bytes"]
    removed = outcome.json("rm", "-y", "org/tiny")
    assert removed["removed"][0]["name"] == "org/tiny"
    assert removed["removed"][0]["freed_bytes"] > len(WEIGHTS)


def test_a_table_of_n_grams_takes_no_memory(standin: StandIn, outcome: Any, tmp_path: Path) -> None:
    """It stays in its files: in a repository, and in a folder; as it is and quantised."""
    for how in (None, {"group_size": 32, "bits": 4}):
        config, tensors = WIDE, tensors_of(WIDE)
        arrays = {name: mx.array(value) for name, value in tensors.items()}
        if how is not None:
            arrays, config = tiny.quantized(arrays, how), {**config, "quantization": how}
        folder = tiny.write(tmp_path / str(how is None), config, arrays)
        table = sum(a.nbytes for n, a in arrays.items() if "ngram_embedding.shard" in n)
        served = {name: (folder / name).read_bytes() for name in ("config.json", WEIGHTS_FILE)}
        standin.repos["org/tiny"] = Repo(dict(MODEL) | served)
        plan = outcome.json("pull", "--dry-run", "org/tiny")
        facts = outcome.json("show", str(folder))
        assert facts["table_bytes"] == table > 0
        in_memory = len(served[WEIGHTS_FILE]) - table
        assert plan["fit"]["weights_bytes"] == facts["fit"]["weights_bytes"] == in_memory
        assert facts["weight_bytes"] == len(served[WEIGHTS_FILE])
        assert "which stays in its files" in outcome("show", str(folder)).out


@pytest.mark.parametrize("case", ["deepseek_v3-v4", "qwen3_next-v4", "tower"])
def test_heads_and_towers_that_are_not_loaded_count_nowhere(
    case: str, standin: StandIn, outcome: Any, tmp_path: Path
) -> None:
    """In a repository that is not downloaded, as in its folder; its weights in two files."""
    if case == "tower":
        text = tiny.tiny_config("llama-v4")
        config = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "x"}}
        aside = {"vision_tower.a": mx.zeros((50, 100))}
        folder = tiny.write(tmp_path, config, tiny.arrays_of(text) | aside)
    else:
        folder = mtp_checkpoint(tmp_path, case)
    arrays = mx.load(str(folder / WEIGHTS_FILE))
    names = sorted(arrays)
    (folder / WEIGHTS_FILE).unlink()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = folder / f"model-{number:05}-of-00002.safetensors"
        mx.save_safetensors(str(file), {name: arrays[name] for name in part})
    served = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    standin.repos["org/tiny"] = Repo({"tokenizer.json": MODEL["tokenizer.json"]} | served)
    plan = outcome.json("pull", "--dry-run", "org/tiny")
    sizes = [size for name, data in served.items() if (size := len(data)) and "saf" in name]
    assert 0 < plan["fit"]["weights_bytes"] == held_bytes(folder) < sum(sizes)


def test_a_pulled_model_that_does_not_fit_is_noted(
    standin: StandIn, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, folder: object, *, weights_bytes: int) -> None:
        raise InsufficientMemoryError(f"{name} does not fit: 2 bits would.")

    monkeypatch.setattr("mlxinfer.memory.fit.require_fit", refuse)
    monkeypatch.setattr("mlxinfer.memory.fit.held_bytes", lambda folder: 1)  # its config is a stub
    pulled = outcome("pull", "org/tiny")
    assert pulled.out.startswith("org/tiny is in ")
    assert "org/tiny does not fit: 2 bits would." in pulled.err


def test_dry_run_fetches_nothing(standin: StandIn, outcome: Any) -> None:
    seen = outcome("pull", "--dry-run", "org/tiny")
    assert "262 kB in 4 files, 262 kB to download" in seen.out
    assert outcome.json("list") == {"models": []}


def test_errors_say_what_to_do(standin: StandIn, outcome: Any) -> None:
    seen = outcome("pull", "org/none")
    assert seen.code == 1
    assert seen.err.splitlines()[0].startswith("error: The hub has no org/none")
    assert seen.err.splitlines()[1] == "hint: `mlxinfer list` shows the models on this disk"
    assert outcome("show", "org/none").code == 1
    standin.faults.status, standin.faults.code = 403, "GatedRepo"
    assert "hf auth login" in outcome("pull", "org/tiny").err


def test_rm_asks_first(standin: StandIn, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome("pull", "org/tiny")
    seen = outcome("rm", "org/tiny")
    assert seen.code == 2
    assert "--yes" in seen.err
    refused = outcome("rm", "org/tiny", "demo")  # what cannot be is said before
    assert (refused.code, refused.err) == (
        1,
        "error: demo is bundled with mlxinfer and cannot be deleted.\n",
    )
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    assert outcome("rm", "org/tiny").code == 1
    assert "org/tiny" in outcome("list").out
    monkeypatch.setattr("click.confirm", lambda *_, **__: True)
    assert outcome("rm", "org/tiny").code == 0


def test_show_what_cannot_run(standin: StandIn, outcome: Any) -> None:
    standin.repos["org/odd"] = Repo({**MODEL, "config.json": b'{"model_type": "oddity"}'})
    outcome("pull", "org/odd")
    facts = outcome.json("show", "org/odd")
    assert facts["supported"] is False
    assert facts["architecture"] == "oddity"
    assert facts["parameters"] == len(WEIGHTS) - 8 - int.from_bytes(WEIGHTS[:8], "little")
    assert "cannot run" in outcome("show", "org/odd").out


def test_rm_of_one_name_given_twice(standin: StandIn, outcome: Any) -> None:
    outcome("pull", "org/tiny")
    seen = outcome("rm", "--yes", "org/tiny", "org/tiny")
    assert (seen.code, seen.err) == (0, "")
    assert seen.out.count("Deleted") == 1
