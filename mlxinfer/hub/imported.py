"""GGUF files that were imported: folders of the hub cache, found again by what is in the file.

    models--gguf--NAME-DIGEST/snapshots/DIGEST/   as a repository's; there only when it is complete
    models--gguf--NAME-DIGEST/refs/main           DIGEST: of all bytes of the file and its parts
    models--gguf--NAME-DIGEST/sources/PLACE       state of the file at a place when it was read
    models--gguf--NAME-DIGEST/notes               sentences on what was left out, a line each

A file that has not changed since is known by its state, and any other by its digest. The file of a
tower counts as one more part.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ..errors import CheckpointError, ModelNotFoundError
from .cache import RepoName, cache_folder

OWNER, NOTES = "gguf", "notes"
FORMAT = 1  # of what is made of a file; another one imports all files anew
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_CHUNK = 8 << 20


_PROJECTOR = "mmproj"  # in the names of files of towers
_NO_NAME = re.compile(
    r"mmproj|model|(?<![a-z0-9])(?:ud|i?q\d\w*|b?f16|fp16|fp?32|mxfp4\w*)(?![a-z0-9])"
)
_PRECISION = ("bf16", "f16", "f32")  # of towers: the first is taken where there are several


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """What is imported."""

    parts: tuple[Path, ...]  # the file, or all parts of it, in order
    projector: Path | None = None  # the file of its tower; None: there is none
    exact: bool = False  # float32 stays float32

    @classmethod
    def at(cls, path: Path, projector: Path | None = None, *, exact: bool = False) -> "GGUFModel":
        """The model at a path. The file of the tower is that beside it, unless another is given.

        Raises: those of `split_parts`, and ModelNotFoundError: there is no such `projector`.
        """
        if projector is not None and not projector.is_file():
            raise ModelNotFoundError(f"mmproj: there is no file {str(projector)!r}.")
        return cls(tuple(split_parts(path)), projector or projector_beside(path), exact)

    @property
    def files(self) -> tuple[Path, ...]:
        return self.parts if self.projector is None else (*self.parts, self.projector)


def projector_beside(path: Path) -> Path | None:
    """The file of the tower of a model, in its folder or at the top of its repository."""
    folders = [path.parent]
    if path.parents[2:3] and path.parents[2].name == "snapshots":
        folders.append(path.parent.parent)
    for folder in folders:
        names = sorted(entry.name for entry in folder.glob(f"*{_PROJECTOR}*.gguf"))
        if (name := choose_projector(path.name, names)) is not None:
            return folder / name
    return None


def choose_projector(model: str, names: Iterable[str]) -> str | None:
    """The file of a model's tower among the names of files of towers; None: none is of its name.

    Without words such as "f16" a name is the beginning of the model's, or nothing.
    """
    ours = _key(model)
    fitting = [name for name in names if ours.startswith(_key(name))]
    return max(fitting, key=lambda name: (len(_key(name)), *_rank(name)), default=None)


def is_projector(path: str) -> bool:
    return _PROJECTOR in path.lower() and path.endswith(".gguf")


def _key(name: str) -> str:
    stem = _PART.sub(r"\g<stem>", name).removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9]", "", _NO_NAME.sub(" ", stem))


def _rank(name: str) -> tuple[bool, ...]:
    return tuple(kind in name.lower() for kind in _PRECISION)


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A file's place in the cache."""

    name: str
    digest: str

    @property
    def repo(self) -> RepoName:
        return RepoName(f"{OWNER}/{self.name}-{self.digest[:12]}")

    @property
    def folder(self) -> Path:
        """The model's folder, there only when it is complete."""
        return self.repo.folder / "snapshots" / self.digest

    def record(self, model: GGUFModel, notes: Iterable[str]) -> None:
        """Note that the folder is complete, and that these files are its source."""
        for path, text in (
            (self.repo.folder / NOTES, "\n".join(notes)),
            (self.repo.folder / "refs" / "main", self.digest),
            (self.repo.folder / "sources" / _place(model), _state(model)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text)
            partial.replace(path)


def notes_of(folder: Path) -> list[str]:
    """What `record` has noted of a folder."""
    path = folder.parents[1] / NOTES
    return path.read_text().splitlines() if path.is_file() else []


def find_imported(model: GGUFModel) -> Path | None:
    """The folder of a file that was imported and has not changed since."""
    state = _state(model)
    for record in cache_folder().glob(f"models--{OWNER}--*/sources/{_place(model)}"):
        reference = record.parents[1] / "refs" / "main"
        if record.read_text() == state and reference.is_file():
            folder = record.parents[1] / "snapshots" / reference.read_text()
            if folder.is_dir():
                return folder
    return None


def imported_file(model: GGUFModel, progress: Callable[[int], None]) -> ImportedFile:
    """The place of a model, by the content of its files.

    Args:
        progress: called with the bytes that are read.
    """
    digest, done = blake2b(_form(model).encode(), digest_size=20), 0
    for part in model.files:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(done)
    hexadecimal = digest.hexdigest()
    for folder in cache_folder().glob(f"models--{OWNER}--*-{hexadecimal[:12]}"):
        name = folder.name.removeprefix(f"models--{OWNER}--").removesuffix(f"-{hexadecimal[:12]}")
        return ImportedFile(name, hexadecimal)  # under the name that it had then
    split = _PART.fullmatch(model.parts[0].name)
    stem = split["stem"] if split else model.parts[0].name.removesuffix(".gguf")
    name = re.sub(r"[^\w.]+|\.\.+", "-", stem, flags=re.ASCII).strip("-.") or "model"
    return ImportedFile(name[:60].rstrip("-."), hexadecimal)


def _form(model: GGUFModel) -> str:
    return f"{FORMAT}{' float32' * model.exact}"


def _place(model: GGUFModel) -> str:
    return blake2b(str(model.parts[0].resolve()).encode(), digest_size=10).hexdigest()


def _state(model: GGUFModel) -> str:
    stats = [part.stat() for part in model.files]
    return f"{_form(model)} " + " ".join(f"{s.st_size}:{s.st_mtime_ns}:{s.st_ino}" for s in stats)


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
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= 1000:
        raise CheckpointError(f"{name[:200]!r} is not the name of a part of a split GGUF file.")
    return [f"{match['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
