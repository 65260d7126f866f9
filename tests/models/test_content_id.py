"""Copies have the same identity; whatever differs in the weights has another, and hashes once."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from models.tiny import tiny_checkpoint

from mlxinfer.errors import CheckpointError
from mlxinfer.models import identity
from mlxinfer.models.identity import ContentId, content_id, hash_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model", "qwen3")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were hashed, in order."""
    names: list[str] = []
    right = identity.hash_files

    def watched(paths):  # type: ignore[no-untyped-def]
        names.extend(path.name for path in paths)
        return right(paths)

    monkeypatch.setattr(identity, "hash_files", watched)
    return names


def test_content_id_of_copies_is_equal(folder: Path, memory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("not part of the model")
    assert content_id(copy, memory) == content_id(folder, memory)
    other = tiny_checkpoint(tmp_path / "other", "qwen3", seed=1)
    assert content_id(other, memory) != content_id(folder, memory)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert content_id(copy, memory) != content_id(folder, memory)


def test_content_id_depends_on_every_byte(folder: Path, memory: Path) -> None:
    """A byte anywhere in the weights, with size and modification time as they were."""
    path = folder / "model.safetensors"
    whole, stat = path.read_bytes(), path.stat()
    names = {content_id(folder, memory)}
    places = range(1000, len(whole), len(whole) // 40)
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        names.add(content_id(folder, memory))
    assert len(names) == 1 + len(places)


def test_a_file_is_hashed_once(folder: Path, memory: Path, hashed: list[str]) -> None:
    name = content_id(folder, memory)
    assert hashed == ["config.json", "model.safetensors"]
    assert content_id(folder, memory) == name
    assert len(hashed) == 2
    (folder / "config.json").write_text("{}")
    content_id(folder, memory)
    assert hashed[2:] == ["config.json"]
    inode = folder / "model.safetensors"
    inode.write_bytes(inode.read_bytes())  # the same bytes: only the times differ
    content_id(folder, memory)
    assert hashed[3:] == ["model.safetensors"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 7}', b"\xff"])
def test_a_broken_memory_costs_another_hash(folder: Path, memory: Path, content: bytes) -> None:
    name = content_id(folder, memory)
    memory.write_bytes(content)
    assert content_id(folder, memory) == name
    assert content_id(folder, folder / "config.json" / "impossible") == name


def test_memory_is_shared_and_bounded(
    folder: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    other = tiny_checkpoint(tmp_path / "other", "qwen3", seed=1)
    content_id(folder, memory)
    content_id(other, memory)
    content_id(folder, memory)
    assert len(hashed) == 4
    monkeypatch.setattr(identity, "MAX_REMEMBERED", 1)
    (other / "config.json").write_text("{}")
    content_id(other, memory)
    content_id(folder, memory)
    assert hashed[4:] == ["config.json", "config.json", "model.safetensors"]


def test_chunks_are_hashed_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a file does not depend on the others, nor on the number of threads."""
    monkeypatch.setattr(identity, "CHUNK_BYTES", 10_000)
    paths = []
    for number, size in enumerate((0, 9_999, 10_000, 10_001, 123_456)):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(os.urandom(size))
    alone = [hash_files([path])[0] for path in paths]
    threads: set[int] = set()
    ready, right = threading.Barrier(3), identity._hash_chunk

    def watched(chunk):  # type: ignore[no-untyped-def]
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            ready.wait(60)
        return right(chunk)

    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(identity, "_hash_chunk", watched)
    assert hash_files(paths) == alone
    assert len(set(alone)) == len(paths)
    assert len(threads) == 3


def test_a_failed_thread_leaves_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100))
    right, caller = identity._hash_chunk, threading.current_thread()

    def hash_chunk(chunk):  # type: ignore[no-untyped-def]
        if threading.current_thread() is not caller:
            failed.set()
            raise MemoryError
        failed.wait(60)
        return right(chunk)

    failed = threading.Event()
    monkeypatch.setattr(identity, "CHUNK_BYTES", 10)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(identity, "_hash_chunk", hash_chunk)
    with pytest.raises(MemoryError):
        hash_files([path])


def test_an_id_in_the_background(
    folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, right = threading.Event(), identity.hash_files

    def late(paths):  # type: ignore[no-untyped-def]
        may_go.wait(60)
        return right(paths)

    monkeypatch.setattr(identity, "hash_files", late)
    background = ContentId(folder, memory)
    assert background.wait(0.0) is None
    may_go.set()
    assert background.wait(60) == content_id(folder, memory)
    assert background.wait(0.0) is not None


def test_content_id_without_weights_names_the_folder(tmp_path: Path, memory: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        content_id(tmp_path, memory)
    assert ContentId(tmp_path, memory).wait(60) is None
