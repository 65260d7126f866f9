"""A hub repository as a Source: headers are fetched at once, a shard when it is first read.

Headers are asked for by range and laid out as sparse files of the right size, so the checks of a
local folder read them too. A fetched shard is deleted after all its tensors were forgotten.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ...errors import CheckpointError, DownloadError, ModelNotFoundError
from ...hub.cache import RepoName, find_snapshot, missing_files, parse_repo_name
from ...hub.remote import (
    Listing,
    RemoteFile,
    cached_file,
    fetch_file,
    fetch_small,
    list_files,
    read_range,
)
from ...models.jsonfields import read_json
from ...models.weights.files import INDEX, MAX_HEADER_BYTES, read_headers
from .base import ReaderSource
from .folder import (
    QUANT_FILES,
    SIDE_FILES,
    SideFiles,
    assemble,
    data_start,
    digest_of,
    exchanged,
    open_folder,
    stored_arrays,
)
from .gguf.header import read_growing
from .gguf.source import assemble_gguf, part_names
from .origin import CARD, Origin, origin_of_card
from .stored import Array, StoredArray

OnBytes = Callable[[int], None]


@dataclass(slots=True)
class HubFiles:
    """Shards that are fetched when they are first read."""

    listing: Listing
    folder: Path  # for shards that are not in the hub cache
    report: OnBytes
    remote: dict[str, RemoteFile] = field(init=False)
    fetched: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Index the listing."""
        self.remote = {file.path: file for file in self.listing.files}

    def path(self, file: str) -> Path:
        """The shard, fetched if need be.

        Raises:
            DownloadError, ModelNotFoundError: as fetch_file().
        """
        cached = cached_file(self.listing, file)
        if cached is not None:
            return cached
        remote = self.remote[file]
        target = self.folder / file
        if not (target.is_file() and target.stat().st_size == remote.size):
            if remote.sha256 is None:
                return fetch_small(self.listing, file)
            fetch_file(self.listing, remote, target, self.report)
        self.fetched.add(file)
        return target

    def size(self, file: str) -> int:
        """Bytes, as the hub says."""
        return self.remote[file].size

    def small(self, array: StoredArray) -> Array:
        """A few float32 numbers, without the rest of their file."""
        data = read_range(self.listing, array.file, array.offset, array.num_bytes)
        return np.frombuffer(data, "<f4")

    def drop(self, file: str) -> None:
        """Delete a shard that was fetched here; the hub cache stays as it is."""
        if file in self.fetched:
            (self.folder / file).unlink(missing_ok=True)
            self.fetched.discard(file)

    def close(self) -> None:
        """Delete all that was fetched here."""
        shutil.rmtree(self.folder, ignore_errors=True)


def open_repo(
    name: str,
    *,
    downloads: Path | None = None,
    report: OnBytes = lambda count: None,
    tokenizer: SideFiles | None = None,
) -> ReaderSource:
    """`org/name[@revision]`, or that and the path of one of its GGUF files.

    Args:
        downloads: where shards are kept until they were read; a later call with the same folder
            goes on with what is there. By default a temporary folder.
        report: called with the number of bytes that arrived.
        tokenizer: files from elsewhere, instead of those in the repository.

    Raises:
        CheckpointError, UnsupportedModelError: as open_folder() and open_gguf().
        ModelNotFoundError, DownloadError: as the hub answers.
    """
    repo, wanted = _parse(name)
    snapshot = find_snapshot(repo)
    if wanted is None and snapshot is not None and not missing_files(snapshot):
        return open_folder(snapshot, tokenizer)
    listing = list_files(repo)
    folder = downloads or Path(tempfile.mkdtemp(prefix="mlxinfer-"))
    files = HubFiles(listing, folder, report)
    try:
        if wanted is None and any(_is_weights(file.path) for file in listing.files):
            return _open_safetensors(files, tokenizer)
        return _open_gguf(files, wanted, tokenizer)
    except BaseException:  # Ctrl-C too: temporary downloads are deleted
        if downloads is None:
            files.close()
        raise


def _parse(name: str) -> tuple[RepoName, str | None]:
    parts = name.split("/")
    if len(parts) > 2 and name.endswith(".gguf"):
        return parse_repo_name("/".join(parts[:2])), "/".join(parts[2:])
    return parse_repo_name(name), None


def _is_weights(path: str) -> bool:
    return path.endswith(".safetensors") and "/" not in path


def _open_safetensors(files: HubFiles, tokenizer: SideFiles | None) -> ReaderSource:
    names = set(files.remote)
    if "config.json" not in names:
        raise CheckpointError(f"{files.listing.repo} has no config.json.")
    texts = [name for name in ("config.json", INDEX, *QUANT_FILES) if name in names]
    with tempfile.TemporaryDirectory(prefix="mlxinfer-") as temporary:
        skeleton = Path(temporary)
        for text in texts:
            shutil.copyfile(fetch_small(files.listing, text), skeleton / text)
        for shard in _shards(skeleton, files):
            _lay_out(files, shard, skeleton / shard)
        headers = {path.name: entries for path, entries in read_headers(skeleton).items()}
        starts = {shard: data_start(skeleton / shard) for shard in headers}
        config = read_json(skeleton / "config.json")
        beside = {text: read_json(skeleton / text) for text in texts if text in QUANT_FILES}
    return assemble(
        label=str(files.listing.repo),
        config=config,
        beside=beside,
        arrays=stored_arrays(headers, starts, files),
        files=files,
        side_files=lambda: exchanged(_side_files(files), tokenizer),
        fingerprint=_fingerprint(files, list(headers), tokenizer),
        is_here=False,
        origin=lambda: _origin(files),
    )


def _origin(files: HubFiles) -> Origin:
    repo = files.listing.repo.repo_id
    if CARD not in files.remote:
        return Origin(repo)
    text = fetch_small(files.listing, CARD).read_text(encoding="utf-8", errors="replace")
    return origin_of_card(text, repo)


def _shards(skeleton: Path, files: HubFiles) -> list[str]:
    """Those that the index names, or all; files of another layout of the same weights are not."""
    found = sorted(path for path in files.remote if _is_weights(path))
    index = skeleton / INDEX
    if "model.safetensors" in found:
        return ["model.safetensors"]
    weight_map = read_json(index).get("weight_map") if index.is_file() else None
    if not isinstance(weight_map, dict):
        return [path for path in found if path.startswith("model")]
    named = {str(value) for value in weight_map.values()}
    return [path for path in found if path in named]


def _lay_out(files: HubFiles, shard: str, target: Path) -> None:
    """A file with the header of a shard, and as long as it."""
    size = files.size(shard)
    length = int.from_bytes(read_range(files.listing, shard, 0, 8), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{shard} says that its header has {length} bytes; it has {size}.")
    with target.open("wb") as file:
        file.write(read_range(files.listing, shard, 0, 8 + length))
        file.truncate(size)


def _open_gguf(
    files: HubFiles,
    wanted: str | None,
    tokenizer: SideFiles | None,
) -> ReaderSource:
    first = wanted or _only_gguf(files)
    if ".." in first or "\\" in first or first.startswith("/"):
        raise ModelNotFoundError(f"{first[:200]!r} is not the name of a file in a repository.")
    folder, name = PurePosixPath(first).parent, PurePosixPath(first).name
    parts = [str(folder / part) for part in part_names(name)]
    missing = [part for part in parts if part not in files.remote]
    if missing:
        raise ModelNotFoundError(f"{files.listing.repo} has no {missing[0]}.")
    headers = {
        part: read_growing(
            lambda count, part=part: memoryview(read_range(files.listing, part, 0, count)),  # type: ignore[misc]
            files.size(part),
            part,
        )
        for part in parts
    }
    return assemble_gguf(
        label=f"{files.listing.repo}/{first}",
        headers=headers,
        files=files,
        side_files=tokenizer,
        fingerprint=_fingerprint(files, parts, tokenizer),
        read_small=files.small,
        origin=lambda: _origin(files),
    )


def _only_gguf(files: HubFiles) -> str:
    names = [path for path in files.remote if path.endswith(".gguf") and "mmproj" not in path]
    models = sorted(
        {str(PurePosixPath(n).parent / part_names(PurePosixPath(n).name)[0]) for n in names}
    )
    repo = files.listing.repo
    if not models:
        pickles = [path for path in files.remote if fnmatchcase(path, "*.bin")]
        why = " Its weights are pickles, which can run any code." if pickles else ""
        raise DownloadError(f"{repo} has no .safetensors and no .gguf weights.{why}")
    if len(models) > 1:
        shown = ", ".join(models[:8]) + (", …" if len(models) > 8 else "")
        raise DownloadError(
            f"{repo} has {len(models)} GGUF models; name one as {repo}/FILE: {shown}"
        )
    return models[0]


def _side_files(files: HubFiles) -> Mapping[str, bytes | Path]:
    found: dict[str, Any] = {
        path: fetch_small(files.listing, path)
        for path in files.remote
        if any(_fits(path, pattern) for pattern in SIDE_FILES)
    }
    return found


def _fits(path: str, pattern: str) -> bool:
    """Like Path.glob, and never outside the folder: names come from the hub."""
    same_depth = path.count("/") == pattern.count("/")
    return same_depth and fnmatchcase(path, pattern) and ".." not in path


def _fingerprint(files: HubFiles, names: list[str], tokenizer: SideFiles | None) -> str:
    """The commit names all files of a repository; a tokenizer from elsewhere counts beside it."""
    parts = [f"{name} {files.size(name)} {files.remote[name].sha256}" for name in names]
    if tokenizer is not None:
        parts.append(digest_of(tokenizer()).hex())
    return f"{files.listing.repo.repo_id} {files.listing.commit} {' '.join(parts)}"
