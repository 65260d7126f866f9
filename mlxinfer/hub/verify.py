"""Checks cached files against the hashes that the hub's cache names them by. No network."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from .cache import RepoName

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")
READ_BYTES = 8 << 20  # at once


def remove_damaged(repo: RepoName) -> list[str]:
    """Delete cached files of `repo` that have another hash than their name says.

    A disk or an interrupted copy may change a file and not its size. Deleted files are fetched
    again by a download; all snapshots that share one need the same bytes.

    Returns:
        The names of the files within their snapshots, sorted.
    """
    damaged = {path for path in _blobs(repo.folder) if not _matches(path)}
    names = set()
    for link in (repo.folder / "snapshots").glob("*/**/*"):
        if link.is_symlink() and link.resolve() in damaged:
            names.add("/".join(link.relative_to(repo.folder / "snapshots").parts[1:]))
            link.unlink()
    for path in damaged:
        path.unlink()
    return sorted(names)


def _blobs(folder: Path) -> Iterator[Path]:
    for path in (folder.resolve() / "blobs").glob("*"):
        if path.is_file() and (_SHA256.fullmatch(path.name) or _GIT.fullmatch(path.name)):
            yield path


def _matches(path: Path) -> bool:
    """Whether a file has the hash that is its name: SHA-256, or git's hash of a small file."""
    digest = hashlib.sha256()
    if _GIT.fullmatch(path.name):
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest() == path.name
