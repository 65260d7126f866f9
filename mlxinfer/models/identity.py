"""The identity of a checkpoint's weights: a digest of every byte, computed once for each file.

Pages of the disk cache are valid for one model only, and a finetune or a merged adapter may differ
from its base in a few rows, so samples of the weights are not enough. Digests are remembered by
path, size, change time, modification time and inode, in a file that several processes share; a
checkpoint is hashed anew only after one of these changed. No mlx.
"""

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import CheckpointError
from ..files import write_whole

CHUNK_BYTES = 64 << 20  # hashed by one thread at once
BUFFER_BYTES = 1 << 20
MAX_THREADS = 4
MAX_REMEMBERED = 1000  # files


class ContentId:
    """The identity of the weights in a folder, computed by threads of its own from now on.

    Args:
        memory: the file of remembered digests; it need not exist, nor be writable.
    """

    def __init__(self, folder: Path, memory: Path) -> None:
        self._found: str | None = None
        self._known = threading.Lock()  # held until the identity is known, or cannot be
        self._known.acquire()
        threading.Thread(
            target=self._run, args=(folder, memory), name="identity", daemon=True
        ).start()

    def wait(self, timeout_s: float) -> str | None:
        """The identity; None: it is not known after `timeout_s`, or a file could not be read."""
        if self._known.acquire(timeout=timeout_s):
            self._known.release()
        return self._found

    def _run(self, folder: Path, memory: Path) -> None:
        try:
            with contextlib.suppress(CheckpointError):
                self._found = content_id(folder, memory)
        finally:
            self._known.release()


def content_id(folder: Path, memory: Path) -> str:
    """A name for the weights in a checkpoint folder: equal for copies, different for all others.

    Of config.json and of each safetensors file, name and contents count.
    """
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    try:
        digests = _digests(paths, memory)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from error
    whole = blake2b(digest_size=20)
    for path, digest in zip(paths, digests, strict=True):
        name = path.name.encode()
        whole.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(digest))
    return whole.hexdigest()


def _digests(paths: Sequence[Path], memory: Path) -> list[str]:
    keys = [_state(path) for path in paths]
    remembered = _read(memory)
    unknown = [i for i, key in enumerate(keys) if key not in remembered]
    digests = dict(zip(unknown, hash_files([paths[i] for i in unknown]), strict=True))
    unchanged = {keys[i]: digest for i, digest in digests.items() if _state(paths[i]) == keys[i]}
    if unchanged:
        _remember(memory, unchanged)
    return [digests[i] if i in digests else remembered[key] for i, key in enumerate(keys)]


def _state(path: Path) -> str:
    """Where a file lies and when it changed. Only a new file or a write changes its ctime."""
    path = path.resolve()
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_ctime_ns} {stat.st_mtime_ns} {stat.st_ino}"


@dataclass(frozen=True, slots=True)
class _Chunk:
    file: int  # its number
    place: int  # among the chunks of that file
    path: Path


def hash_files(paths: Sequence[Path]) -> list[str]:
    """The digest of each file: SHA-256 over those of its chunks of CHUNK_BYTES.

    Chunks of all files are hashed by several threads, at most half of the cores: hashlib releases
    the interpreter's lock, and processors have instructions for SHA-256.

    Raises:
        OSError: a file cannot be read.
    """
    waiting: SimpleQueue[_Chunk] = SimpleQueue()
    counts = [max(1, -(-path.stat().st_size // CHUNK_BYTES)) for path in paths]
    for file, (path, count) in enumerate(zip(paths, counts, strict=True)):
        for place in range(count):
            waiting.put(_Chunk(file, place, path))
    digests = [[b""] * count for count in counts]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not failures:
                chunk = waiting.get_nowait()
                digests[chunk.file][chunk.place] = _hash_chunk(chunk)
        except Empty:
            pass
        except BaseException as error:  # raised below: a digest that lacks a part names nothing
            failures.append(error)

    num_helpers = min(MAX_THREADS, (os.cpu_count() or 1) // 2, waiting.qsize()) - 1
    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_helpers)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [sha256(b"".join(parts)).hexdigest() for parts in digests]


def _hash_chunk(chunk: _Chunk) -> bytes:
    digest, buffer = sha256(), memoryview(bytearray(BUFFER_BYTES))
    with chunk.path.open("rb", buffering=0) as file:
        file.seek(chunk.place * CHUNK_BYTES)
        left = CHUNK_BYTES
        while left and (count := file.readinto(buffer[: min(left, BUFFER_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _read(memory: Path) -> dict[str, str]:
    """Read the remembered hashes. A file that is missing or broken has none."""
    try:
        content: Any = json.loads(memory.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if _is_digest(value)}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _remember(memory: Path, digests: dict[str, str]) -> None:
    """Add digests to the file; the latest MAX_REMEMBERED stay. A failure costs another hash."""
    remembered = {
        key: value for key, value in _read(memory).items() if key not in digests
    } | digests
    remembered = dict(list(remembered.items())[-MAX_REMEMBERED:])
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(memory, json.dumps(remembered, indent=0).encode())
