"""A hub repository at one commit: its files, and parts of a file; and the search."""

import os
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..errors import DownloadError
from .cache import RepoName, offline
from .failures import first_line, hub_failures, patiently
from .fetch import Source, open_stream

METADATA_TIMEOUT_S = 15.0
MAX_FOUND = 30
EXPANDED = ["downloads", "likes", "lastModified", "safetensors", "gated", "pipeline_tag"]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository."""

    path: str
    size: int  # bytes
    sha256: str | None  # None: small enough to be kept in git


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of a repository at one commit."""

    repo: RepoName
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A repository that the search found."""

    name: str
    downloads: int  # of the last month
    likes: int
    updated_s: float | None  # since 1970
    parameters: int | None
    gated: bool  # downloads need a token of an account that was let in


def endpoint() -> str | None:
    """Return the hub's address from HF_ENDPOINT, None if it is not set."""
    address = os.environ.get("HF_ENDPOINT")
    return address.rstrip("/") if address else None


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
        data = patiently(lambda: _range(source_url(listing, path), start, count))
    if len(data) < count:
        raise DownloadError(f"The hub sent {len(data)} of {count} bytes of {path}; try again.")
    return data


def source_of(listing: Listing, file: RemoteFile) -> Source:
    """Return where a large file is, and its content."""
    assert file.sha256 is not None, file
    return Source(source_url(listing, file.path), file.size, file.sha256, file.path)


def source_url(listing: Listing, path: str) -> str:
    """Return the address of a file."""
    from huggingface_hub import hf_hub_url

    return str(hf_hub_url(listing.repo.repo_id, path, revision=listing.commit, endpoint=endpoint()))


def search_models(words: str, *, mlx_only: bool = True) -> list[FoundModel]:
    """Return repositories with safetensors and these words in their names, by downloads.

    Args:
        words: what to look for; "": the most downloaded of all.
        mlx_only: only those that were converted for MLX.

    Raises:
        DownloadError: the hub could not be reached, or refused.
    """
    if offline():
        raise DownloadError("HF_HUB_OFFLINE forbids to search the hub.")
    from huggingface_hub.errors import HTTPError

    try:
        found = patiently(lambda: _search(words, mlx_only))
    except (HTTPError, OSError, ValueError, KeyError) as error:
        raise DownloadError(
            f"The hub cannot be searched ({first_line(error)}). Check the network."
        ) from error
    return [_found(info) for info in found]


def _range(url: str, start: int, count: int) -> bytes:
    from huggingface_hub.utils import hf_raise_for_status

    data = bytearray()
    with open_stream(url, f"{start}-{start + count - 1}") as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and start:
            raise DownloadError("The hub sends whole files only, not parts of them.")
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= count:  # a server may send all that follows
                break
    return bytes(data[:count])


def _search(words: str, mlx_only: bool) -> list[dict[str, Any]]:
    """Send one request. HfApi.list_models would retry for half a minute while people wait."""
    from huggingface_hub import get_session
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    query: dict[str, Any] = {
        "filter": ["safetensors", *(["mlx"] if mlx_only else [])],
        "sort": "downloads",
        "direction": "-1",
        "limit": MAX_FOUND,
        "expand": EXPANDED,
    }
    answer = get_session().get(
        f"{endpoint() or ENDPOINT}/api/models",
        params=query | ({"search": words} if words else {}),
        headers=build_hf_headers(library_name="mlxinfer"),
        timeout=METADATA_TIMEOUT_S,
    )
    hf_raise_for_status(answer)
    found: list[dict[str, Any]] = answer.json()
    return found


def _found(said: dict[str, Any]) -> FoundModel:
    updated = said.get("lastModified")
    return FoundModel(
        name=str(said["id"]),
        downloads=said.get("downloads") or 0,
        likes=said.get("likes") or 0,
        updated_s=datetime.fromisoformat(updated).timestamp() if updated else None,
        parameters=(said.get("safetensors") or {}).get("total"),
        gated=bool(said.get("gated")),
    )
