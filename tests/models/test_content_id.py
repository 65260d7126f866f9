"""Copies have the same name; whatever differs in the weights has another."""

import shutil
import struct
from pathlib import Path

import pytest
from models.tiny import tiny_checkpoint

from mlxinfer.errors import CheckpointError
from mlxinfer.models.safetensors import MAX_SAMPLES, SAMPLE_BYTES, content_id, read_header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model", "qwen3")


def test_content_id_of_copies_is_equal(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("not part of the model")
    assert content_id(copy) == content_id(folder)
    assert content_id(tiny_checkpoint(tmp_path / "other", "qwen3", seed=1)) != content_id(folder)


def test_content_id_depends_on_every_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole, name = path.read_bytes(), content_id(folder)
    (length,) = struct.unpack("<Q", whole[:8])
    for info in read_header(path).values():
        changed = bytearray(whole)
        changed[8 + length + (info.start + info.end) // 2] ^= 1
        path.write_bytes(changed)
        assert content_id(folder) != name


def test_content_id_depends_on_the_config(folder: Path) -> None:
    name = content_id(folder)
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    assert content_id(folder) != name


def test_content_id_reads_samples_of_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tensors, size = 2 * MAX_SAMPLES + 1, 1 << 16
    entries = ",".join(
        f'"{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{i * size},{(i + 1) * size}]}}'
        for i in range(num_tensors)
    )
    header = f"{{{entries}}}".encode()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_tensors * size)  # half a gigabyte of nothing
    read = 0

    def sample(file, info, start):  # type: ignore[no-untyped-def]
        nonlocal read
        read += SAMPLE_BYTES
        return b""

    monkeypatch.setattr("mlxinfer.models.safetensors._sample", sample)
    content_id(tmp_path)
    assert 0 < read <= MAX_SAMPLES * SAMPLE_BYTES


def test_content_id_without_weights_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        content_id(tmp_path)
