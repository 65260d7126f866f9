"""Model name -> local folder: find, download, list, remove."""

import difflib
import os
import shutil
from functools import partial
from pathlib import Path

from ..errors import InvalidRequestError, ModelError, ModelNotFoundError, shown
from .cache import (
    ASSETS,
    BUNDLED,
    LocalModel,
    RepoName,
    bundled_models,
    cache_folder,
    cached_models,
    disk_bytes,
    find_snapshot,
    is_gguf,
    missing_files,
    models_elsewhere,
    offline,
)
from .download import DownloadPlan, Progress, is_locked, plan_download
from .download import download as download_repo
from .gguf import GGUFName, files_of, find_gguf, gguf_inside, parse_gguf_name
from .imported import GGUFModel, find_imported


def resolve(name: str, *, download: bool = True, progress: Progress | None = None) -> Path:
    """Return the folder of a model: bundled, a local folder, or a hub repository.

    A repository that is complete in the hub cache is used as it is, without asking the network;
    pull() brings it up to date.

    Args:
        name: "demo", "demo-vision" or "demo-draft" (bundled), a folder,
            `org/name[@revision]`, or a GGUF file that was imported.
        download: fetch a repository that is not in the cache.
        progress: called with the bytes that are here and all of them, from several threads.

    Raises:
        ModelNotFoundError: there is no model of this name.
        DownloadError: the hub could not be reached or refused, or the disk is full.
        ModelError: a file or folder may not be read.
    """
    path = locate(name, download=download, progress=progress)
    return path if path.is_dir() else _imported(path)


def locate(name: str, *, download: bool = True, progress: Progress | None = None) -> Path:
    """Return what a name means: a folder, see `resolve`, or a GGUF file of a repository.

    Args: see resolve(). Names of GGUF files are `org/name[@revision]:QUANT` and
        `org/name[@revision]/file.gguf`; and `org/name`, where there are no safetensors.

    Raises: those of resolve(), and InsufficientMemoryError: no file of a repository fits.
    """
    try:
        return _located(name, download, progress)
    except OSError as error:
        said = error.strerror or error
        raise ModelError(f"{shown(name)} cannot be read: {error.filename}: {said}.") from None


def _located(name: str, download: bool, progress: Progress | None) -> Path:
    local = _local_folder(name)
    if local is not None:
        return local
    wanted = _parse(name)
    if (file := find_gguf(wanted)) is not None:
        return file
    snapshot = find_snapshot(wanted.repo)
    if wanted.is_bare and snapshot is not None and not missing_files(snapshot):
        return snapshot
    if not download or offline():
        raise ModelNotFoundError(_why_not_here(wanted, snapshot) + _suggestion(name))
    folder = _fetch(wanted, progress)
    return find_gguf(wanted) or folder


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Download a repository or bring it up to date, and return its folder; a local model stays.

    Raises: those of resolve().
    """
    return _local_folder(name) or _fetch(_parse(name), progress)


def plan_pull(name: str) -> DownloadPlan:
    """Return what pull() would fetch, and whether it fits on the disk.

    Raises: those of resolve(), and InvalidRequestError for a local model.
    """
    if _local_folder(name) is not None:
        raise InvalidRequestError(f"{name} is local: there is nothing to download.", param="name")
    wanted = _parse(name)
    return plan_download(wanted.repo, partial(files_of, wanted))


def is_bundled(name: str) -> bool:
    return name in BUNDLED


def list_models() -> list[LocalModel]:
    return [*bundled_models(), *cached_models()]


def remove(name: str) -> int:
    """Delete a repository, or one revision of it, from the hub cache. Returns the bytes freed.

    Raises: those of check_removable().
    """
    check_removable(name)
    repo = _parse(name).repo
    before = disk_bytes(repo.folder)
    _delete(repo, whole="@" not in name)
    return before - (disk_bytes(repo.folder) if repo.folder.exists() else 0)


def check_removable(name: str) -> None:
    """Raise unless remove() will find something that it may delete.

    Raises:
        InvalidRequestError: a bundled model, a local folder, a link to one, one file of a
            repository, or a repository that is being downloaded.
        ModelNotFoundError: it is not in the cache.
    """
    if name in BUNDLED:
        raise InvalidRequestError(
            f"{name} is bundled with mlxinfer and cannot be deleted.", param="name"
        )
    if os.path.isdir(os.path.expanduser(name)):
        raise InvalidRequestError(
            f"{name} is a folder, not a download: delete it yourself.", param="name"
        )
    wanted = _parse(name)
    repo = wanted.repo
    if not wanted.is_bare:  # others of the repository may be in use
        raise InvalidRequestError(
            f"{name} is a file of {repo}, and a repository is deleted whole: name {repo}.",
            param="name",
        )
    if not repo.folder.is_dir():
        raise ModelNotFoundError(f"{repo} is not in the hub cache.{_suggestion(name)}")
    if repo.folder.is_symlink():  # to delete the link alone would free nothing and lose track of it
        raise InvalidRequestError(
            f"{repo} is a link to {repo.folder.resolve()}: delete that folder "
            f"and the link {repo.folder} yourself.",
            param="name",
        )
    if _is_being_downloaded(repo):
        raise InvalidRequestError(
            f"{repo} is being downloaded by another process; wait for it or stop it, then try "
            "again.",
            param="name",
        )


def _is_being_downloaded(repo: RepoName) -> bool:
    """Whether a file of the repository is locked by this package or by huggingface_hub."""
    ours = (repo.folder / "blobs").glob("*.incomplete")
    theirs = (cache_folder() / ".locks" / repo.folder.name).glob("*.lock")
    return any(is_locked(path) for path in (*ours, *theirs))


def _delete(repo: RepoName, *, whole: bool) -> None:
    if whole:
        shutil.rmtree(repo.folder)
        return
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(cache_folder())
    repos = [r for r in cache.repos if r.repo_type == "model" and r.repo_id == repo.repo_id]
    revisions = {revision for r in repos for revision in r.revisions}
    revisions = {r for r in revisions if repo.revision in {r.commit_hash, *r.refs}}
    if not revisions:
        raise ModelNotFoundError(f"{repo} is not in the hub cache.")
    cache.delete_revisions(*(revision.commit_hash for revision in revisions)).execute()


def _local_folder(name: str) -> Path | None:
    if name in BUNDLED:
        folder = ASSETS / name
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"The bundled model {name!r} is missing from this installation; reinstall mlxinfer."
            )
        return folder
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return gguf_inside(Path(path)) or Path(path)
    if os.path.isfile(path):
        return _imported(Path(path))
    # Of a repository, `org/name/file.gguf` has such a name as well.
    is_file = name.endswith(".gguf") and (
        name.count("/") < 2 or os.path.isdir(os.path.dirname(path))
    )
    if is_file or name.startswith(("/", "./", "../", "~")) or name in {".", ".."}:
        what = "file" if name.endswith(".gguf") else "folder"
        raise ModelNotFoundError(f"There is no {what} {shown(name)}.")
    return None


def _imported(file: Path) -> Path:
    if not is_gguf(file):
        raise ModelNotFoundError(
            f"{str(file)!r} does not begin as GGUF files do ({file.stat().st_size} bytes): "
            "download it again, or run `git lfs pull` where git-lfs left a pointer."
            if file.suffix == ".gguf"
            else f"{str(file)!r} is a file; expected the folder with its config.json and "
            ".safetensors, or a GGUF file."
        )
    folder = find_imported(GGUFModel.at(file))
    if folder is None:
        raise ModelNotFoundError(
            f"{str(file)!r} is a GGUF file that was not imported yet; mlxinfer run does so."
        )
    return folder


def _parse(name: str) -> GGUFName:
    try:
        return parse_gguf_name(name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}{_suggestion(name)}") from None


def _fetch(wanted: GGUFName, progress: Progress | None) -> Path:
    try:
        return download_repo(wanted.repo, partial(files_of, wanted), progress=progress)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}{_suggestion(str(wanted.repo))}") from None


def _why_not_here(wanted: GGUFName, snapshot: Path | None) -> str:
    state = f"{wanted} is not on this disk"
    if snapshot is not None and wanted.is_bare:
        state = f"{wanted} is not complete on this disk (missing: {missing_files(snapshot)[0]})"
    if offline():
        return f"{state}, and HF_HUB_OFFLINE forbids downloads."
    return f"{state}. Download it: mlxinfer pull {wanted}"


def _suggestion(name: str) -> str:
    names = [model.name for model in list_models()]
    by_tail = {known.rpartition("/")[2].lower(): known for known in names}
    close = difflib.get_close_matches(name, names, n=1) or [
        by_tail[tail]
        for tail in difflib.get_close_matches(name.rpartition("/")[2].lower(), by_tail, n=1)
    ]
    return f" Did you mean {close[0]!r}?" if close and close[0] != name else ""
