"""One page of a prefix as bytes with a checksum. Knows no files.

An entry is its header, key ids, payload and checksum, all little-endian:

    magic 8s | version u32 | tokens u32 | payload bytes u64 | key 20s | parent key 20s
    key ids u64 each | payload | BLAKE2b-128 of everything before it

The key is the page's name (`prefix/index.py`), with the number of the layer group as its last byte.
So a prompt's entries are found without an index. Key ids are token ids, and for other inputs, such
as pictures, larger ids that stand for them.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO

from ...files import sync_folder
from ..prefix.index import ID_BYTES, KEY_BYTES, VERSION, group_key, pack_ids, page_key

_MAGIC = b"MLXIKV\r\n"  # the line end shows files that were copied as text
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}s{KEY_BYTES}s")
_CHECKSUM_BYTES = 16
NO_BYTES = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of tokens and what was stored for it."""

    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    payload: memoryview = NO_BYTES  # (payload bytes,) read-only

    @property
    def is_named(self) -> bool:
        return group_key(page_key(self.parent, self.token_ids), self.key[-1]) == self.key

    @property
    def num_bytes(self) -> int:
        return entry_bytes(len(self.token_ids), self.payload.nbytes)


def entry_bytes(num_tokens: int, payload_bytes: int) -> int:
    return _HEADER.size + ID_BYTES * num_tokens + payload_bytes + _CHECKSUM_BYTES


def encode(entry: Entry) -> list[bytes | memoryview]:
    """The parts of an entry's file, in order; the payload is not copied."""
    head = _HEADER.pack(
        _MAGIC, VERSION, len(entry.token_ids), entry.payload.nbytes, entry.key, entry.parent
    )
    parts: list[bytes | memoryview] = [head + pack_ids(entry.token_ids), entry.payload]
    return [*parts, _checksum(parts)]


def decode(data: bytes, key: bytes | None = None) -> Entry | None:
    """The entry of a file; None: it is not a whole and sound entry, or has another key."""
    body, checksum = memoryview(data)[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(body) < _HEADER.size or _checksum([body]) != checksum:
        return None
    magic, version, num_tokens, num_bytes, own_key, parent = _HEADER.unpack_from(body)
    start = _HEADER.size + ID_BYTES * num_tokens
    if (magic, version) != (_MAGIC, VERSION) or len(body) != start + num_bytes:
        return None
    token_ids = struct.unpack_from(f"<{num_tokens}Q", body, _HEADER.size)
    entry = Entry(own_key, parent, token_ids, body[start:])
    return entry if entry.is_named and key in (own_key, None) else None


def read_entry(file: BinaryIO, max_bytes: int) -> Entry | None:
    """The entry that comes next in a file of several; None: no whole and sound one does.

    Args:
        file: is read as far as the entry goes.
        max_bytes: an entry that says it is larger is not read.
    """
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    _, _, num_tokens, num_bytes, _, _ = _HEADER.unpack(header)
    rest = ID_BYTES * num_tokens + num_bytes + _CHECKSUM_BYTES
    return None if rest > max_bytes else decode(header + file.read(rest))


def _checksum(parts: Sequence[bytes | memoryview]) -> bytes:
    checksum = blake2b(digest_size=_CHECKSUM_BYTES, person=b"entry")
    for part in parts:
        checksum.update(part)
    return checksum.digest()


class Files:
    """The operating system's files. Every method raises OSError as the system does."""

    def make_folder(self, folder: str) -> None:
        """Make a folder and those above it, for this user alone; fine where it exists."""
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def create(self, path: str) -> int:
        """Open a file that must not exist, for this user alone; its handle."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        """Write some of `data`, at least a byte; how many."""
        return os.write(handle, data)

    def fsync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def read(self, path: str) -> bytes:
        """All of a file that is not a link."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            return file.read()

    def rename(self, path: str, to: str) -> None:
        """Replace a file by another, in one go."""
        os.replace(path, to)

    def sync_folder(self, folder: str) -> None:
        sync_folder(folder)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def info(self, path: str) -> tuple[int, int]:
        """Size in bytes, and when it was last used (`mtime`), in nanoseconds."""
        status = os.stat(path, follow_symlinks=False)
        return status.st_size, status.st_mtime_ns

    def is_pinned(self, path: str) -> bool:
        """Whether the file has another name, too: a saved session keeps it."""
        return os.stat(path, follow_symlinks=False).st_nlink > 1

    def mark_used(self, path: str, at_ns: int) -> None:
        """Set the time of last use, in nanoseconds since the epoch."""
        os.utime(path, ns=(at_ns, at_ns))
