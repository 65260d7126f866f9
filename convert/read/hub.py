"""Repositories of the hub, downloaded into its cache: a folder of safetensors, or a GGUF file."""

from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ...errors import DownloadError, ModelNotFoundError
from ...hub import Progress, cache_folder, resolve
from ...hub.cache import RepoName, find_snapshot, missing_files, parse_repo_name
from ...hub.remote import endpoint, hub_failures, list_files
from .gguf.source import part_names


def fetch_repo(name: str, progress: Progress) -> Path:
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
    return _fetch_gguf(repo, wanted or _only_gguf(repo, paths), paths)


def _parse(name: str) -> tuple[RepoName, str | None]:
    parts = name.split("/")
    if len(parts) > 2 and name.endswith(".gguf"):
        return parse_repo_name("/".join(parts[:2])), "/".join(parts[2:])
    return parse_repo_name(name), None


def _parts(first: str) -> list[str]:
    """The paths of all parts of a GGUF model."""
    if ".." in first or "\\" in first or first.startswith("/"):
        raise ModelNotFoundError(f"{first[:200]!r} is not the name of a file in a repository.")
    folder, name = PurePosixPath(first).parent, PurePosixPath(first).name
    return [str(folder / part) for part in part_names(name)]


def _all_here(snapshot: Path, wanted: str) -> bool:
    return all((snapshot / part).is_file() for part in _parts(wanted))


def _fetch_gguf(repo: RepoName, first: str, paths: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    parts = _parts(first)
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


def _only_gguf(repo: RepoName, paths: list[str]) -> str:
    names = [path for path in paths if path.endswith(".gguf") and "mmproj" not in path]
    models = sorted({_parts(name)[0] for name in names})
    if not models:
        pickles = any(fnmatchcase(path, "*.bin") for path in paths)
        why = " Its weights are pickles, which can run any code." if pickles else ""
        raise DownloadError(f"{repo} has no .safetensors and no .gguf weights.{why}")
    if len(models) > 1:
        shown = ", ".join(models[:8]) + (", …" if len(models) > 8 else "")
        raise DownloadError(
            f"{repo} has {len(models)} GGUF models; name one as {repo}/FILE: {shown}"
        )
    return models[0]
