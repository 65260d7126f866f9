"""Repositories on a stand-in hub: downloaded into the cache, and read from there."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub import standin as standin_module
from hub.standin import Repo, StandIn
from models.random_weights import tiny_tensors
from models.tiny import tiny_config
from oracles.checkpoints import Stored, f32, write_file, write_folder
from oracles.gguf_files import write_model

from mlxinfer import hub as hub_package
from mlxinfer.convert.read import open_source
from mlxinfer.errors import DownloadError, ModelNotFoundError
from mlxinfer.hub import remote as hub_remote

VALUES = {name: np.full((64, 64), place, np.float32) for place, name in enumerate("abcd")}


def sharded(folder: Path) -> dict[str, bytes]:
    """Two shards, an index, a tokenizer, and files that are not wanted."""
    write_folder(folder, {}, torch_dtype="float16")
    (folder / "model.safetensors").unlink()
    for number, names in ((1, "ab"), (2, "cd")):
        tensors: dict[str, Stored] = {f"{name}.weight": f32(VALUES[name]) for name in names}
        write_file(folder / f"model-0000{number}-of-00002.safetensors", tensors)
    weight_map = {
        f"{name}.weight": f"model-0000{1 + place // 2}-of-00002.safetensors"
        for place, name in enumerate("abcd")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# read me")
    (folder / "consolidated.safetensors").write_bytes(b"another layout")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """An empty hub cache, and a hub that has one repository."""
    from huggingface_hub import close_session

    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of sources that are not closed
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(hub_remote, "RETRY_WAIT_S", 0.001)
    monkeypatch.setattr(standin_module, "LARGE", (".safetensors", ".gguf"))
    close_session()
    with StandIn({"org/model": Repo(sharded(tmp_path / "repo"))}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_repository_is_downloaded_once(served: StandIn) -> None:
    seen: list[int] = []
    source = open_source("org/model", progress=lambda done, _: seen.append(done))
    assert list(source.tensors) == [f"{name}.weight" for name in "abcd"]
    assert (source.label, source.format, source.dtype) == ("org/model", "safetensors", "float16")
    assert np.array_equal(np.array(source.read("b.weight", slice(3, 5))), VALUES["b"][3:5])
    assert seen[-1] == max(seen) > 4 * 64 * 64 * 4
    served.log.clear()
    assert open_source("org/model").fingerprint == source.fingerprint
    assert served.log == []


def test_the_hub_cache_is_used_and_left_alone(served: StandIn, tmp_path: Path) -> None:
    folder = hub_package.pull("org/model")
    served.log.clear()
    source = open_source("org/model")
    assert np.array_equal(np.array(source.read("d.weight")), VALUES["d"])
    assert (folder / "model-00002-of-00002.safetensors").is_file()
    assert served.log == []


def test_side_files_come_from_the_repository(served: StandIn) -> None:
    files = open_source("org/model").side_files()
    assert list(files) == ["tokenizer.json"]
    path = files["tokenizer.json"]
    assert isinstance(path, Path)
    assert path.read_text() == "{}"


def test_gguf_files_are_chosen_by_their_quantisation(served: StandIn, tmp_path: Path) -> None:
    config = tiny_config("qwen3-v4")
    tensors = tiny_tensors(config)
    (tmp_path / "gguf").mkdir()
    write_model(tmp_path / "gguf" / "m-Q8_0.gguf", config, tensors)
    write_model(tmp_path / "gguf" / "m-BF16.gguf", config, tensors, split=20)
    files = {path.name: path.read_bytes() for path in (tmp_path / "gguf").iterdir()}
    served.repos["org/gguf"] = Repo({**files, "mmproj.gguf": b""})
    with pytest.raises(
        ModelNotFoundError, match=r"no q4_k_m; it has m-Q8_0\.gguf, m-BF16-00001-of"
    ):
        open_source("org/gguf:q4_k_m")
    for name in ("m-Q8_0.gguf", "m-BF16-00001-of-00002.gguf"):
        source = open_source(f"org/gguf/{name}")
        assert set(source.tensors) == set(tensors)
        assert any("reads text only" in note and "is empty" in note for note in source.notes)
        for tensor in ("model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"):
            assert np.array_equal(np.array(source.read(tensor)), tensors[tensor])
    served.log.clear()
    assert set(open_source("org/gguf/m-Q8_0.gguf").tensors) == set(tensors)
    assert served.log == []
    with pytest.raises(ModelNotFoundError, match="nothing"):
        open_source("org/gguf/nothing.gguf")


def test_names_from_the_hub_stay_in_their_folder(served: StandIn, tmp_path: Path) -> None:
    files = served.repos["org/model"].files
    for name in ("/tmp/x.tiktoken", "../x.tiktoken", "additional_chat_templates/../../x.jinja"):
        files[name] = b""
    assert list(open_source("org/model").side_files()) == ["tokenizer.json"]
    served.repos["org/one"] = Repo({"../m.gguf": b"GGUF", "m-00009-of-00002.gguf": b"GGUF"})
    with pytest.raises(DownloadError, match=r"no \.safetensors"):
        open_source("org/one")
    with pytest.raises(ModelNotFoundError, match="not the name of a file"):
        open_source("org/one/../m.gguf")


def test_repositories_without_weights_of_ours(served: StandIn) -> None:
    served.repos["org/pickles"] = Repo({"pytorch_model.bin": b"", "config.json": b"{}"})
    with pytest.raises(DownloadError, match="pickles"):
        open_source("org/pickles")
    with pytest.raises(ModelNotFoundError):
        open_source("org/missing")
