"""GGUF files that were imported: folders of the hub cache, found again by what is in the file.

    models--gguf--NAME-DIGEST/snapshots/DIGEST/   as a repository's; there only when it is complete
    models--gguf--NAME-DIGEST/refs/main           DIGEST: of all bytes of the file and its parts
    models--gguf--NAME-DIGEST/sources/PLACE       state of the file at a place when it was read

A file that has not changed since is known by its state, and any other by its digest.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ..errors import CheckpointError, ModelNotFoundError
from .cache import RepoName, cache_folder

OWNER = "gguf"
FORMAT = 1  # of what is made of a file; another one imports all files anew
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A file's place in the cache."""

    name: str
    digest: str

    @property
    def repo(self) -> RepoName:
        """Its name on the command line."""
        return RepoName(f"{OWNER}/{self.name}-{self.digest[:12]}")

    @property
    def folder(self) -> Path:
        """The model's folder, there only when it is complete."""
        return self.repo.folder / "snapshots" / self.digest

    def record(self, parts: Sequence[Path]) -> None:
        """Note that the folder is complete, and that these files are its source."""
        for path, text in (
            (self.repo.folder / "refs" / "main", self.digest),
            (self.repo.folder / "sources" / _place(parts), _state(parts)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text)
            partial.replace(path)


def find_imported(parts: Sequence[Path]) -> Path | None:
    """The folder of a file that was imported and has not changed since."""
    state = _state(parts)
    for record in cache_folder().glob(f"models--{OWNER}--*/sources/{_place(parts)}"):
        reference = record.parents[1] / "refs" / "main"
        if record.read_text() == state and reference.is_file():
            folder = record.parents[1] / "snapshots" / reference.read_text()
            if folder.is_dir():
                return folder
    return None


def imported_file(parts: Sequence[Path], progress: Callable[[int], None]) -> ImportedFile:
    """The place of a file, by its content.

    Args:
        parts: the file, or all parts of it, in order.
        progress: called with the bytes that are read.
    """
    digest, done = blake2b(str(FORMAT).encode(), digest_size=20), 0
    for part in parts:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(done)
    hexadecimal = digest.hexdigest()
    for folder in cache_folder().glob(f"models--{OWNER}--*-{hexadecimal[:12]}"):
        name = folder.name.removeprefix(f"models--{OWNER}--").removesuffix(f"-{hexadecimal[:12]}")
        return ImportedFile(name, hexadecimal)  # under the name that it had then
    split = _PART.fullmatch(parts[0].name)
    stem = split["stem"] if split else parts[0].name.removesuffix(".gguf")
    name = re.sub(r"[^\w.]+|\.\.+", "-", stem, flags=re.ASCII).strip("-.") or "model"
    return ImportedFile(name[:60].rstrip("-."), hexadecimal)


def _place(parts: Sequence[Path]) -> str:
    return blake2b(str(parts[0].resolve()).encode(), digest_size=10).hexdigest()


def _state(parts: Sequence[Path]) -> str:
    stats = [part.stat() for part in parts]
    return f"{FORMAT} " + " ".join(f"{s.st_size}:{s.st_mtime_ns}:{s.st_ino}" for s in stats)


def split_parts(path: Path) -> list[Path]:
    """The file, or all parts of a split one.

    Raises:
        CheckpointError: not a name of a part.
        ModelNotFoundError: a part is missing.
    """
    parts = [path.parent / name for name in part_names(path.name)]
    for part in parts:
        if not part.is_file():
            raise ModelNotFoundError(
                f"{path.parent} has no {part.name}, which belongs to {path.name}."
            )
    return parts


def part_names(name: str) -> list[str]:
    """The names of all parts of a split file, from the name of one."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= 1000:
        raise CheckpointError(f"{name[:200]!r} is not the name of a part of a split GGUF file.")
    return [f"{match['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
