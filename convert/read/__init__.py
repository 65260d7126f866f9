"""Checkpoints of every common format as one kind of Source: `open_source`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ...errors import CheckpointError, DownloadError, ModelNotFoundError
from ...hub import Progress, cache_folder, is_bundled, resolve
from ...hub.cache import RepoName, find_snapshot, is_gguf, missing_files, parse_repo_name
from ...hub.imported import part_names
from ...hub.remote import endpoint, hub_failures, list_files
from .folder import local_side_files, open_folder
from .gguf.source import open_gguf
from .source import MLXFormat, Packed, SourceModel, SourceTensor, expert_groups

__all__ = [
    "MLXFormat",
    "Packed",
    "SourceModel",
    "SourceTensor",
    "expert_groups",
    "open_source",
]


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_source(
    source: str | Path,
    *,
    tokenizer: Path | None = None,
    progress: Progress = lambda *_: None,
    reading: Progress = lambda *_: None,
) -> SourceModel:
    """Open a checkpoint for reading, tensor by tensor.

    Args:
        source: a folder of safetensors, a GGUF file, a folder with one GGUF file, a bundled model,
            or a hub repository as org/name[@revision] or org/name[@revision]/file.gguf.
        tokenizer: a folder with a tokenizer, taken instead of the source's own.
        progress: called while a repository of the hub is downloaded.
        reading: called while the header of a GGUF file is read.

    Raises:
        CheckpointError: a file that is broken, or a pickle.
        DownloadError: the hub could not be reached or refused.
        ModelNotFoundError: nothing is there.
        UnsupportedModelError: a format or an architecture that is not known.
    """
    files = None if tokenizer is None else _tokenizer_of(tokenizer)
    path = resolve(str(source)) if is_bundled(str(source)) else Path(source).expanduser()
    if path.exists():
        return _open(path, files, reading)
    if isinstance(source, Path) or source.startswith(("/", "./", "../", "~")):
        raise ModelNotFoundError(f"There is no {str(source)!r}.")
    return replace(_open(_fetch_repo(source, progress), files, reading), label=source)


def _open(
    path: Path, tokenizer: Mapping[str, bytes | Path] | None, reading: Progress
) -> SourceModel:
    if path.is_dir() and not any(path.glob("*.safetensors")):
        path = _only_gguf(path) or path
    if path.is_dir():
        return open_folder(path, tokenizer)
    if path.suffix == ".gguf" or is_gguf(path):
        return open_gguf(path, tokenizer, reading)
    raise _unreadable(path)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder, or the first part of it; None where there is none."""
    names = sorted(path.name for path in folder.iterdir() if _of_model(path.name))
    models = sorted({part_names(name)[0] for name in names})
    if len(models) > 1:
        raise CheckpointError(f"{folder} has {len(models)} GGUF models; name one: {models[0]}, …")
    return folder / names[0] if models else None


def _of_model(path: str) -> bool:
    """Whether a GGUF file holds a language model, not what sees for one."""
    return path.endswith(".gguf") and "mmproj" not in path


def _tokenizer_of(folder: Path) -> Mapping[str, bytes | Path]:
    files = local_side_files(folder)
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        raise ModelNotFoundError(f"The folder for the tokenizer, {folder}, has no tokenizer.json.")
    return files


def _unreadable(path: Path) -> CheckpointError:
    if path.suffix in _PICKLES:
        return CheckpointError(
            f"{path} is a pickle, which can run any code and is never opened; use a safetensors or "
            "GGUF version of this model."
        )
    return CheckpointError(f"{path} is a file; expected a folder, or a .gguf file.")


# -- repositories of the hub, downloaded into its cache -----------------------------------------


def _fetch_repo(name: str, progress: Progress) -> Path:
    """`org/name[@revision]`, or that and the path of one of its GGUF files, as it is on this disk.

    Returns:
        The folder with safetensors, or a GGUF file; its other parts lie beside it.

    Raises:
        ModelNotFoundError, DownloadError: as the hub answers.
    """
    repo, wanted = _parse(name)
    snapshot = find_snapshot(repo)
    if wanted is None and snapshot is not None and not missing_files(snapshot):
        return snapshot
    if wanted is not None and snapshot is not None and _all_here(snapshot, wanted):
        return snapshot / wanted
    paths = [file.path for file in list_files(repo).files]
    if wanted is None and any(p.endswith(".safetensors") and "/" not in p for p in paths):
        return resolve(name, progress=progress)
    return _fetch_gguf(repo, wanted or _only_of_repo(repo, paths), paths)


def _parse(name: str) -> tuple[RepoName, str | None]:
    parts = name.split("/")
    if len(parts) > 2 and name.endswith(".gguf"):
        return parse_repo_name("/".join(parts[:2])), "/".join(parts[2:])
    return parse_repo_name(name), None


def _safe_parts(first: str) -> list[str]:
    if ".." in first or "\\" in first or first.startswith("/"):
        raise ModelNotFoundError(f"{first[:200]!r} is not the name of a file in a repository.")
    folder, name = PurePosixPath(first).parent, PurePosixPath(first).name
    return [str(folder / part) for part in part_names(name)]


def _all_here(snapshot: Path, wanted: str) -> bool:
    return all((snapshot / part).is_file() for part in _safe_parts(wanted))


def _fetch_gguf(repo: RepoName, first: str, paths: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    parts = _safe_parts(first)
    if missing := [part for part in parts if part not in paths]:
        raise ModelNotFoundError(f"{repo} has no {missing[0]}.")
    with hub_failures(repo):
        folder = snapshot_download(
            repo.repo_id,
            revision=repo.revision,
            cache_dir=cache_folder(),
            endpoint=endpoint(),
            allow_patterns=[part.replace("[", "[[]") for part in (*parts, "README.md")],
            library_name="mlxinfer",
        )
    return Path(folder) / first


def _only_of_repo(repo: RepoName, paths: list[str]) -> str:
    models = sorted({_safe_parts(path)[0] for path in paths if _of_model(path)})
    if not models:
        pickles = any(path.endswith(".bin") for path in paths)
        why = " Its weights are pickles, which can run any code." if pickles else ""
        raise DownloadError(f"{repo} has no .safetensors and no .gguf weights.{why}")
    if len(models) > 1:
        shown = ", ".join(models[:8]) + (", …" if len(models) > 8 else "")
        raise DownloadError(
            f"{repo} has {len(models)} GGUF models; name one as {repo}/FILE: {shown}"
        )
    return models[0]
