"""GGUF files of the hub's repositories: `org/name:Q4_K_M`, `org/name/file.gguf`, or `org/name`.

Of a repository that has safetensors a bare name means these. Of one that has GGUF files alone it
means a file that is here already, else the largest quantised one that fits this machine. That file
alone is downloaded, with all of its parts where it is split, and with the file of its tower.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError, InsufficientMemoryError, ModelNotFoundError
from ..memory import human_bytes, models_limit_bytes
from .cache import RepoName, find_snapshot, missing_files, parse_repo_name
from .download import needed
from .imported import choose_projector, is_projector, part_names
from .remote import Listing

logger = logging.getLogger(__name__)

KV_SHARE = 0.1  # of the weights: room for a KV cache beside them
LATEST = "latest"  # Ollama's tag of whatever there is
_QUANT = re.compile(r"[A-Za-z0-9][\w.-]{0,40}", re.ASCII)
_FULL = re.compile(r"(?<![a-z0-9])(bf16|f16|fp16|f32|fp32)(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GGUFName:
    """What a name asks for."""

    repo: RepoName
    file: str | None = None  # its path in the repository
    quant: str | None = None  # as it stands in the name of a file

    def __str__(self) -> str:
        if self.is_bare:
            return str(self.repo)
        return f"{self.repo}/{self.file}" if self.file else f"{self.repo}:{self.quant}"

    @property
    def is_bare(self) -> bool:
        return self.file is None and self.quant is None

    def matching(self, files: Iterable[str]) -> list[str]:
        """The files that it may mean, the plainest names first.

        Args:
            files: paths of a repository; of split files, all parts.
        """
        known = set(files)
        whole = [first for first in _models(known) if known.issuperset(_parts(first))]
        if self.file is not None:
            return [first for first in whole if first == _parts(self.file)[0]]
        if self.quant is not None:
            asked = re.compile(rf"(?<![a-z0-9]){re.escape(self.quant)}(?![a-z0-9_])", re.IGNORECASE)
            whole = [first for first in whole if asked.search(first)]
        return sorted(whole, key=len)


def parse_gguf_name(name: str) -> GGUFName:
    """Read `org/name[@revision]`, with `:QUANT` or `/path/of/file.gguf` behind it.

    Raises:
        ModelNotFoundError: this cannot be such a name.
    """
    front, colon, quant = name.rpartition(":")
    if colon and _QUANT.fullmatch(quant):
        return GGUFName(parse_repo_name(front), None, None if quant == LATEST else quant)
    parts = name.split("/")
    if len(parts) > 2 and name.endswith(".gguf"):
        path = "/".join(parts[2:])
        _parts(path)
        return GGUFName(parse_repo_name("/".join(parts[:2])), path)
    return GGUFName(parse_repo_name(name))


def find_gguf(name: GGUFName) -> Path | None:
    """The file, or the first part of it, that is here already.

    Several may be here: of these, the largest. None where a bare name means safetensors.
    """
    snapshot = find_snapshot(name.repo)
    if snapshot is None or (name.is_bare and not missing_files(snapshot)):
        return None
    here = {p.relative_to(snapshot).as_posix(): p for p in snapshot.rglob("*.gguf") if p.is_file()}
    matching = name.matching(here)
    if not matching:
        return None
    if not name.is_bare:
        return here[matching[0]]
    return here[max(matching, key=lambda first: _size(first, here))]


def gguf_inside(folder: Path) -> Path | None:
    """The one GGUF model of a folder that has no config.json, by its file or its first part.

    Raises:
        ModelNotFoundError: it has several.
    """
    if (folder / "config.json").exists():
        return None
    models = _models(path.name for path in folder.glob("*.gguf"))
    if len(models) > 1:
        raise ModelNotFoundError(
            f"{folder} has {len(models)} GGUF models: {', '.join(models)[:400]}. Name one of them."
        )
    return folder / models[0] if models else None


def _models(files: Iterable[str]) -> list[str]:
    return sorted({_parts(path)[0] for path in files if _of_model(path)})


def files_of(name: GGUFName, listing: Listing) -> set[str]:
    """The files to download: those of a GGUF model, or safetensors and the texts beside them.

    Raises:
        ModelNotFoundError: the repository has no such file.
        DownloadError: it has no weights that could be loaded.
        InsufficientMemoryError: none of its files fits this machine.
    """
    sizes = {file.path: file.size for file in listing.files}
    plain = any(path.endswith(".safetensors") and "/" not in path for path in sizes)
    if name.is_bare and (plain or not any(map(_of_model, sizes))):
        return needed(listing)
    chosen = _chosen(name, sizes)
    return {*_parts(chosen), *_projector(chosen, sizes)}


def _projector(chosen: str, sizes: Iterable[str]) -> list[str]:
    """The file of the tower, beside the chosen one or at the top; [] where there is none."""
    for folder in dict.fromkeys([PurePosixPath(chosen).parent, PurePosixPath(".")]):
        here = [PurePosixPath(path) for path in sorted(sizes) if is_projector(path)]
        names = [path.name for path in here if path.parent == folder]
        if (name := choose_projector(PurePosixPath(chosen).name, names)) is not None:
            return [(folder / name).as_posix()]
    return []


def _chosen(name: GGUFName, sizes: Mapping[str, int]) -> str:
    """The first part of the file that a name means. Raises what `files_of` raises."""
    matching = name.matching(sizes)
    if not matching:
        available = ", ".join(GGUFName(name.repo).matching(sizes)[:12])
        raise ModelNotFoundError(
            f"{name.repo} has no {name.file or name.quant}; it has {available}."
        )
    if not name.is_bare:
        return matching[0]
    limit = models_limit_bytes()
    towers = {one: sum(sizes[path] for path in _projector(one, sizes)) for one in matching}
    fitting = [
        one for one in matching if (_size(one, sizes) + towers[one]) * (1 + KV_SHARE) <= limit
    ]
    if not fitting:
        least = min(matching, key=lambda one: _size(one, sizes))
        raise InsufficientMemoryError(
            f"None of the {len(matching)} GGUF models of {name.repo} fits: the smallest, {least}, "
            f"has {human_bytes(_size(least, sizes))}, and models may take {human_bytes(limit)} on "
            f"this machine. {name.repo}:QUANT takes one of them nevertheless."
        )
    quantised = [one for one in fitting if not _FULL.search(one)]
    chosen = max(quantised or fitting, key=lambda one: _size(one, sizes))
    if len(matching) > 1:
        logger.warning(
            "%s has %d GGUF models: %s (%s) is the best that fits this machine; %s:QUANT takes "
            "another",
            *(name.repo, len(matching), chosen, human_bytes(_size(chosen, sizes)), name.repo),
        )
    return chosen


def _size(first: str, sizes: Mapping[str, int | Path]) -> int:
    part_sizes = (sizes[part] for part in _parts(first))
    return sum(size.stat().st_size if isinstance(size, Path) else size for size in part_sizes)


def _of_model(path: str) -> bool:
    if not path.endswith(".gguf") or is_projector(path):
        return False
    try:
        return bool(_parts(path))
    except (CheckpointError, ModelNotFoundError):
        return False


def _parts(first: str) -> list[str]:
    """All parts of a file, by its path in a repository.

    Raises:
        ModelNotFoundError: the path leaves the repository.
        CheckpointError: a part of a split file with an impossible number.
    """
    if ".." in first or "\\" in first or first.startswith("/"):
        raise ModelNotFoundError(f"{first[:200]!r} is not the name of a file in a repository.")
    folder, name = PurePosixPath(first).parent, PurePosixPath(first).name
    return [str(folder / part) for part in part_names(name)]
