"""safetensors headers: what the reference writes is read; what lies is refused by name."""

import json
import os
import resource
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mlxinfer.errors import CheckpointError, ModelNotFoundError
from mlxinfer.hub.cache import missing_files
from mlxinfer.models.jsonfields import read_json
from mlxinfer.models.weights import files
from mlxinfer.models.weights.files import INDEX, TensorInfo, open_weights, read_header, read_headers


def write(path, header, data: bytes, *, length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, *, dtype: str = "F32", shape=None):
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape,
            "data_offsets": [start, end]}  # fmt: skip


def test_a_sound_file_is_read(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 8), "b": entry(8, 12)}, bytes(12))
    assert read_header(path)["b"] == TensorInfo("F32", (1,), 8, 12)


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 4), "b": entry(8, 12)},  # a gap
        {"a": entry(0, 16)},  # past the end
        {"a": entry(0, 12, dtype="F33")},
        {"a": entry(0, 12, dtype="F4", shape=[24])},  # of the format, but no array has it
        {"a": entry(0, 12, shape=[3.0])},
        b"{nope",
        b'{"\xff": 1}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}',
    ],
    ids=str,
)
def test_what_the_library_refuses_is_an_error_of_ours(tmp_path, header):
    path = write(tmp_path / "x.safetensors", header, bytes(12))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(path)


@given(st.data())
def test_mutations_never_escape(tmp_path, data):
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 8), "b": entry(8, 12)}, bytes(12))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(CheckpointError):
        read_header(path)


# Which files are read.


def shard(folder, name: str, *tensors: str):
    save_file({tensor: np.zeros(1, np.float32) for tensor in tensors}, folder / name)


def index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_those_of_an_index_or_all_that_are_there(tmp_path):
    for name, tensor in (("model-1", "a"), ("other", "b"), ("model-2", "c")):
        shard(tmp_path, f"{name}.safetensors", tensor)

    def names():
        return sorted(path.stem for path in read_headers(tmp_path))

    assert names() == ["model-1", "model-2"]
    index(tmp_path, {"a": "model-1.safetensors", "b": "other.safetensors"})
    assert names() == ["model-1", "other"]


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "weights.bin", "", 7,
     "a\\..\\b.safetensors", "missing.safetensors", "x" * 300 + ".safetensors"],
)  # fmt: skip
def test_index_entries_outside_the_folder_are_refused(tmp_path, name):
    (tmp_path / "sub").mkdir()
    shard(tmp_path / "sub", "model.safetensors", "a")
    index(tmp_path / "sub", {"a": name})
    (tmp_path / "sub" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="index"):
        read_headers(tmp_path / "sub")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map(tmp_path, weight_map):
    index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        read_headers(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    shard(tmp_path, "model-1.safetensors", "a")
    shard(tmp_path, "model-2.safetensors", "a")
    with pytest.raises(CheckpointError, match="'a'"):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_an_empty_folder_has_no_model_and_pickles_are_refused(tmp_path, name):
    with pytest.raises(ModelNotFoundError):
        read_headers(tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="pickle"):
        read_headers(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(path)


def test_pipes_and_devices_are_not_read(tmp_path):
    for name, read in (("model.safetensors", read_header), ("config.json", read_json)):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match="is no file"):
            read(tmp_path / name)


def test_a_model_may_have_more_files_than_the_process_may_open(tmp_path, monkeypatch):
    """macOS allows 256 at first, and a model of 400 GB has as many."""
    for number in range(40):
        write(tmp_path / f"model-{number}.safetensors", {f"t{number}": entry(0, 4)}, bytes(4))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = os.open(tmp_path, os.O_RDONLY) + 20
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        assert len(open_weights(tmp_path)) == 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        monkeypatch.setattr(files, "raise_file_limit", lambda _: None)
        with pytest.raises(CheckpointError, match=r"ulimit -n"):
            open_weights(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(few - 20)


def index_of(folder: Path, *names: str) -> None:
    index(folder, {f"t{number}": name for number, name in enumerate(names)})


def numbered(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def test_files_that_are_there_decide_where_an_index_disagrees(tmp_path: Path) -> None:
    """Shards 1 to N of N are a model beside the index of another build; half of one is none."""
    index_of(tmp_path, *(numbered(number, 3) for number in (1, 2, 3)))
    shard(tmp_path, numbered(1, 2), "a")
    with pytest.raises(CheckpointError, match="missing"):
        read_headers(tmp_path)
    assert missing_files(tmp_path)
    shard(tmp_path, numbered(2, 2), "b")
    assert [path.name for path in read_headers(tmp_path)] == [numbered(1, 2), numbered(2, 2)]
    assert not any("safetensors" in name for name in missing_files(tmp_path))
    shard(tmp_path, numbered(1, 3), "c")  # of the other build, as far as it is downloaded
    with pytest.raises(CheckpointError, match="missing"):
        read_headers(tmp_path)
    assert numbered(2, 3) in missing_files(tmp_path)


def test_an_index_of_whole_shards_comes_before_one_file_beside_them(tmp_path: Path) -> None:
    shard(tmp_path, "model.safetensors", "other")
    index_of(tmp_path, numbered(1, 2), numbered(2, 2))
    assert [path.name for path in read_headers(tmp_path)] == ["model.safetensors"]
    shard(tmp_path, numbered(1, 2), "a")
    shard(tmp_path, numbered(2, 2), "b")
    assert [path.name for path in read_headers(tmp_path)] == [numbered(1, 2), numbered(2, 2)]
