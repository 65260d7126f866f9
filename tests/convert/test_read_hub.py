"""Repositories on a stand-in hub: headers first, shards when they are read, gone when they were."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub import standin as standin_module
from hub.standin import Repo, StandIn
from models.random_weights import tiny_tensors
from models.tiny import tiny_config
from oracles.checkpoints import Stored, f16, f32, write_file, write_folder
from oracles.gguf_files import llama3_factors, write_model
from oracles.integers import gptq

from mlxinfer import hub as hub_package
from mlxinfer.convert.read import hub as hub_source
from mlxinfer.convert.read import open_source
from mlxinfer.errors import CheckpointError, DownloadError, ModelNotFoundError
from mlxinfer.hub import failures as hub_failures
from mlxinfer.hub.remote import Listing

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
    monkeypatch.setattr(hub_failures, "RETRY_WAIT_S", 0.001)
    monkeypatch.setattr(standin_module, "LARGE", (".safetensors", ".gguf"))
    close_session()
    with StandIn({"org/model": Repo(sharded(tmp_path / "repo"))}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def bodies(server: StandIn) -> int:
    """Whole shards that were asked for, not only their headers."""
    return len([line for line in server.asked_for("GET /cdn/") if "bytes=" not in line])


def test_nothing_but_headers_is_fetched_to_open(served: StandIn, tmp_path: Path) -> None:
    source = open_source("org/model", downloads=tmp_path / "shards")
    assert list(source.tensors) == [f"{name}.weight" for name in "abcd"]
    assert (source.label, source.format, source.dtype) == ("org/model", "safetensors", "float16")
    assert bodies(served) == 0
    assert files_in(tmp_path / "shards") == []


def test_a_shard_comes_when_it_is_read_and_goes_when_it_was(
    served: StandIn, tmp_path: Path
) -> None:
    arrived: list[int] = []
    source = open_source("org/model", downloads=tmp_path / "shards", report=arrived.append)
    assert np.array_equal(np.array(source.read("a.weight")), VALUES["a"])
    assert np.array_equal(np.array(source.read("b.weight", slice(3, 5))), VALUES["b"][3:5])
    assert files_in(tmp_path / "shards") == ["model-00001-of-00002.safetensors"]
    assert bodies(served) == 1
    assert sum(arrived) == (tmp_path / "shards/model-00001-of-00002.safetensors").stat().st_size
    source.forget(["a.weight"])
    assert files_in(tmp_path / "shards") == ["model-00001-of-00002.safetensors"]
    source.forget(["b.weight"])
    assert files_in(tmp_path / "shards") == []
    assert np.array_equal(np.array(source.read("c.weight")), VALUES["c"])
    source.close()
    assert files_in(tmp_path / "shards") == []


def test_a_second_run_goes_on_with_what_is_there(served: StandIn, tmp_path: Path) -> None:
    first = open_source("org/model", downloads=tmp_path / "shards")
    first.read("a.weight")
    second = open_source("org/model", downloads=tmp_path / "shards")
    assert second.fingerprint == first.fingerprint
    second.read("b.weight")
    assert bodies(served) == 1
    served.repos["org/model"].commit = "f" * 40
    assert open_source("org/model").fingerprint != first.fingerprint


def test_the_hub_cache_is_used_and_left_alone(served: StandIn, tmp_path: Path) -> None:
    folder = hub_package.pull("org/model")
    served.log.clear()
    source = open_source("org/model")
    assert np.array_equal(np.array(source.read("d.weight")), VALUES["d"])
    source.forget(source.tensors)
    source.close()
    assert (folder / "model-00002-of-00002.safetensors").is_file()
    assert served.log == []


def test_side_files_come_from_the_repository(served: StandIn) -> None:
    files = open_source("org/model").side_files()
    assert list(files) == ["tokenizer.json"]
    path = files["tokenizer.json"]
    assert isinstance(path, Path)
    assert path.read_text() == "{}"


def test_a_damaged_shard_is_not_read(served: StandIn, tmp_path: Path) -> None:
    source = open_source("org/model", downloads=tmp_path / "shards")
    served.faults.damage = True
    with pytest.raises(DownloadError, match="damaged"):
        source.read("a.weight")
    served.faults.damage = False
    assert np.array_equal(np.array(source.read("a.weight")), VALUES["a"])


def test_a_header_that_lies_is_refused(served: StandIn, monkeypatch) -> None:
    """And nothing like as much as it says is fetched or held."""
    asked: list[int] = []
    right = hub_source.read_range

    def counting(listing: Listing, path: str, start: int, count: int) -> bytes:
        asked.append(count)
        return right(listing, path, start, count)

    monkeypatch.setattr(hub_source, "read_range", counting)
    files = served.repos["org/model"].files
    name = "model-00001-of-00002.safetensors"
    files[name] = (1 << 60).to_bytes(8, "little") + files[name][8:]
    with pytest.raises(CheckpointError, match="header"):
        open_source("org/model")
    assert max(asked) == 8


def test_act_order_is_taken_from_the_config_where_the_index_is_far(
    served: StandIn, tmp_path: Path
) -> None:
    """g_idx is data: looking at it would fetch every shard."""
    codes, zeros = np.zeros((128, 32), int), np.zeros((2, 32), int)
    leaves = gptq(codes, zeros, np.ones((2, 32)), np.arange(128) // 64, 4, 1)
    tensors = {f"a.{leaf}": stored for leaf, stored in leaves.items()}
    for act_order in (False, True):
        how = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": act_order}
        folder = write_folder(tmp_path / "gptq", {**tensors, "b.bias": f16(np.ones(4))}, how)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        served.repos[f"org/gptq-{act_order}"] = Repo(files)
        source = open_source(f"org/gptq-{act_order}")
        assert (source.tensors["a.weight"].lossless is None) == act_order
        assert bodies(served) == 0


def test_gguf_repositories(served: StandIn, tmp_path: Path) -> None:
    config = tiny_config("qwen3-v4")
    tensors = tiny_tensors(config)
    (tmp_path / "gguf").mkdir()
    write_model(tmp_path / "gguf" / "m-Q8_0.gguf", config, tensors)
    write_model(tmp_path / "gguf" / "m-BF16.gguf", config, tensors, split=20)
    files = {path.name: path.read_bytes() for path in (tmp_path / "gguf").iterdir()}
    served.repos["org/gguf"] = Repo({**files, "mmproj.gguf": b""})
    with pytest.raises(DownloadError, match=r"2 GGUF models; .*m-BF16-00001-of.*m-Q8_0"):
        open_source("org/gguf")
    for name in ("m-Q8_0.gguf", "m-BF16-00001-of-00002.gguf"):
        source = open_source(f"org/gguf/{name}", downloads=tmp_path / "shards")
        assert set(source.tensors) == set(tensors)
        for tensor in ("model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"):
            assert np.array_equal(np.array(source.read(tensor)), tensors[tensor])
        source.close()
    assert bodies(served) == 3
    with pytest.raises(ModelNotFoundError, match="nothing"):
        open_source("org/gguf/nothing.gguf")


def test_a_config_that_depends_on_a_tensor_fetches_that_alone(
    served: StandIn, tmp_path: Path
) -> None:
    config = tiny_config("llama-v4")
    path, factors = tmp_path / "m.gguf", llama3_factors(config)
    write_model(path, config, tiny_tensors(config), rope_factors=factors)
    served.repos["org/one"] = Repo({"m.gguf": path.read_bytes()})
    stated = open_source("org/one").config["rope_scaling"]
    assert {key: stated[key] for key in config["rope_scaling"]} == config["rope_scaling"]
    assert bodies(served) == 0


def test_names_from_the_hub_stay_in_their_folder(served: StandIn, tmp_path: Path) -> None:
    files = served.repos["org/model"].files
    for name in ("/tmp/x.tiktoken", "../x.tiktoken", "additional_chat_templates/../../x.jinja"):
        files[name] = b""
    assert list(open_source("org/model").side_files()) == ["tokenizer.json"]
    served.repos["org/one"] = Repo({"../m.gguf": b"GGUF"})
    with pytest.raises(ModelNotFoundError, match="not the name of a file"):
        open_source("org/one")


def test_repositories_without_weights_of_ours(served: StandIn) -> None:
    served.repos["org/pickles"] = Repo({"pytorch_model.bin": b"", "config.json": b"{}"})
    with pytest.raises(DownloadError, match="pickles"):
        open_source("org/pickles")
    with pytest.raises(ModelNotFoundError):
        open_source("org/missing")
