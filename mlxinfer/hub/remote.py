"""A hub repository at one commit: its files, parts of a file, single files.

For callers that work through a repository without keeping it: no branch of the cache is moved, and
large files go where the caller wants them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import DownloadError
from .cache import RepoName, cache_folder, find_snapshot, offline
from .fetch import Source, Stop, fetch, hub_failures, patiently

METADATA_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository."""

    path: str
    size: int  # bytes
    sha256: str | None  # None: small enough to be kept in git


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    repo: RepoName
    commit: str
    files: tuple[RemoteFile, ...]


def list_files(repo: RepoName) -> Listing:
    """Ask the hub for the files of `repo`.

    Raises:
        ModelNotFoundError, DownloadError: as hub_failures() words them.
    """
    if offline():
        raise DownloadError(f"HF_HUB_OFFLINE forbids to ask the hub for {repo}.")
    with hub_failures(repo):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=endpoint(), library_name="mlxinfer")
        info = patiently(
            lambda: api.model_info(
                repo.repo_id,
                revision=repo.revision,
                files_metadata=True,
                timeout=METADATA_TIMEOUT_S,
            )
        )
    files = (
        RemoteFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None)
        for s in info.siblings or ()
    )
    return Listing(repo, info.sha, tuple(files))


def endpoint() -> str | None:
    """Return the hub's address from HF_ENDPOINT, None if it is not set."""
    address = os.environ.get("HF_ENDPOINT")
    return address.rstrip("/") if address else None


def cached_file(listing: Listing, path: str) -> Path | None:
    """Return the path of a file of this commit in the hub cache, None if it is not there."""
    snapshot = find_snapshot(RepoName(listing.repo.repo_id, listing.commit))
    found = snapshot / path if snapshot else None
    return found if found is not None and found.is_file() else None


def read_range(listing: Listing, path: str, start: int, count: int) -> bytes:
    """Return `count` bytes of a file from byte `start` on, or fewer at its end.

    Raises:
        ModelNotFoundError, DownloadError: as hub_failures() words them.
    """
    size = next(file.size for file in listing.files if file.path == path)
    count = min(count, size - start)
    if count <= 0:
        return b""
    with hub_failures(listing.repo):
        data = patiently(lambda: _range(_url(listing, path), start, count))
    if len(data) < count:
        raise DownloadError(f"The hub sent {len(data)} of {count} bytes of {path}; try again.")
    return data


def fetch_file(
    listing: Listing,
    file: RemoteFile,
    target: Path,
    report: Callable[[int], None],
) -> None:
    """Bring a large file to `target`, continuing where an earlier call was interrupted.

    Args:
        listing: of the file.
        file: one with a SHA-256.
        target: its path on the disk.
        report: called with the number of bytes that arrived.

    Raises:
        ModelNotFoundError, DownloadError: as hub_failures() words them; the content is not the
            announced one.
    """
    assert file.sha256 is not None, file
    target.parent.mkdir(parents=True, exist_ok=True)
    source = Source(_url(listing, file.path), file.size, file.sha256, file.path)
    with hub_failures(listing.repo):
        fetch(source, target, report, Stop())


def fetch_small(listing: Listing, path: str) -> Path:
    """Bring a small file to the hub cache and return its path there.

    Raises:
        ModelNotFoundError, DownloadError: as hub_failures() words them.
    """
    from huggingface_hub import hf_hub_download

    with hub_failures(listing.repo):
        return Path(
            hf_hub_download(
                listing.repo.repo_id,
                path,
                revision=listing.commit,
                cache_dir=cache_folder(),
                endpoint=endpoint(),
                library_name="mlxinfer",
            )
        )


def _range(url: str, start: int, count: int) -> bytes:
    from huggingface_hub import get_session
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers(library_name="mlxinfer")
    headers |= {"Accept-Encoding": "identity", "Range": f"bytes={start}-{start + count - 1}"}
    data = bytearray()
    with get_session().stream(
        "GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT
    ) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and start:
            raise DownloadError(
                "The hub sends whole files only, so a part of one is not to be had."
            )
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= count:  # a server may send all that follows
                break
    return bytes(data[:count])


def _url(listing: Listing, path: str) -> str:
    from huggingface_hub import hf_hub_url

    return str(hf_hub_url(listing.repo.repo_id, path, revision=listing.commit, endpoint=endpoint()))
