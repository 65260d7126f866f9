"""What a hub repository holds, at which commit. Knows no cache, and fetches no file."""

import os
from dataclasses import dataclass

from ..errors import DownloadError
from .errors import hub_failures
from .fetch import patiently
from .names import RepoName, offline

METADATA_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository."""

    path: str
    size: int  # bytes
    sha256: str | None  # None: small enough to be kept in git


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit."""

    repo: RepoName
    commit: str
    files: tuple[RemoteFile, ...]


def list_files(repo: RepoName) -> Listing:
    """Ask the hub what `repo` holds.

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
    """The hub's address, where the user gave one (HF_ENDPOINT)."""
    address = os.environ.get("HF_ENDPOINT")
    return address.rstrip("/") if address else None
