"""Requests to the hub: the files of a repository, parts of a file, the search; and its failures."""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from ..errors import DownloadError, MlxinferError, ModelNotFoundError
from .cache import RepoName, cache_folder, offline

LOGIN = "`hf auth login` (or set HF_TOKEN)"  # a sentence of its own, which a page leaves out
MAX_TRIES = 3
RETRY_WAIT_S = 1.0  # doubled with each failure
MAX_WAIT_S = 60.0
TRANSIENT = (408, 429, 500, 502, 503, 504)
Found = TypeVar("Found")
UNKNOWN = (
    "The hub has no {name}, or it is private. Check the spelling. For a private model: " + LOGIN
)
ANSWERS = {  # HTTP status -> message
    401: "The hub did not accept your token for {name}. For another one: " + LOGIN,
    403: "The hub does not let you read {name}: ask for access at https://huggingface.co/{name}. "
    "Then: " + LOGIN,
    429: "The hub limits how often you may ask: wait a while. More is allowed after " + LOGIN,
}
METADATA_TIMEOUT_S = 15.0
MAX_FOUND = 30
ERRNO = re.compile(r"\[Errno -?\d+\] ")
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
        raise DownloadError(f"HF_HUB_OFFLINE forbids requests to the hub, such as for {repo}.")
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


def read_beginning(listing: Listing, path: str, count: int) -> bytes:
    """Return the first `count` bytes of a file, or all of a shorter one.

    Raises:
        ModelNotFoundError, DownloadError: as hub_failures() words them.
    """
    size = next(file.size for file in listing.files if file.path == path)
    count = min(count, size)
    if not count:
        return b""
    with hub_failures(listing.repo):
        data = patiently(lambda: _beginning(source_url(listing, path), count))
    if len(data) < count:
        raise DownloadError(f"The hub sent {len(data)} of {count} bytes of {path}; try again.")
    return data


def source_url(listing: Listing, path: str) -> str:
    from huggingface_hub import hf_hub_url

    return str(hf_hub_url(listing.repo.repo_id, path, revision=listing.commit, endpoint=endpoint()))


def search_models(words: str, *, mlx_only: bool = True) -> list[FoundModel]:
    """Return repositories with safetensors and these words in their names, by downloads.

    Args:
        words: what to look for; "": the most downloaded of all.

    Raises:
        DownloadError: the hub could not be reached, or refused.
    """
    if offline():
        raise DownloadError("HF_HUB_OFFLINE forbids requests to the hub.")
    from huggingface_hub.errors import HTTPError

    try:
        infos = patiently(lambda: _search(words, mlx_only))
    except (HTTPError, OSError, ValueError, KeyError) as error:
        raise DownloadError(
            f"The hub cannot be searched ({_first_line(error)}). Check the network."
        ) from None
    return [_found(info) for info in infos]


def open_stream(url: str, byte_range: str = "") -> Any:
    """Return the context manager of a response whose body is read in pieces.

    `byte_range`: a part of it, such as "0-99" or "100-"; "": all.
    """
    from huggingface_hub import get_session
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import build_hf_headers

    headers = {**build_hf_headers(library_name="mlxinfer"), "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={byte_range}"} if byte_range else {}
    return get_session().stream("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT)


def _beginning(url: str, count: int) -> bytes:
    from huggingface_hub.utils import hf_raise_for_status

    data = bytearray()
    with open_stream(url, f"0-{count - 1}") as response:
        hf_raise_for_status(response)
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
    infos: list[dict[str, Any]] = answer.json()
    return infos


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


# -- failures: as errors of this package, and which are tried again -----------------------------


@contextmanager
def hub_failures(repo: RepoName) -> Iterator[None]:
    """Turn errors of the network, the hub and the disk into ModelNotFoundError or DownloadError."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except MlxinferError:
        raise
    except (HTTPError, OSError, HFValidationError) as error:
        raise _translate(error, repo) from None


def patiently(ask: Callable[[], Found]) -> Found:
    """Call `ask` up to three times, with waits while the hub is busy; raise the last failure."""
    from huggingface_hub.errors import HTTPError

    for failures in range(1, MAX_TRIES):
        try:
            return ask()
        except HTTPError as error:
            if not is_transient(error):
                raise
            time.sleep(wait_s(error, failures))
    return ask()


def is_transient(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code in TRANSIENT


def wait_s(error: Exception, failures: int) -> float:
    """Return how long to wait after `failures` in a row; the hub may ask for more."""
    from huggingface_hub.errors import HfHubHTTPError

    seconds = RETRY_WAIT_S * 2 ** (failures - 1)
    if isinstance(error, HfHubHTTPError):
        asked = error.response.headers.get("Retry-After", "")
        seconds = max(seconds, float(asked)) if asked.isdecimal() else seconds
    return min(seconds, MAX_WAIT_S)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message without "[Errno 8]", or its class if empty."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ERRNO.sub("", line)


def _translate(error: BaseException, repo: RepoName) -> MlxinferError:
    from huggingface_hub import errors as theirs

    name = repo.repo_id
    if isinstance(error, theirs.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _translate(error.__cause__, repo)
    if isinstance(error, theirs.GatedRepoError):
        return DownloadError(
            f"{name} is gated: it needs your token, and access that you ask for at "
            f"https://huggingface.co/{name}. Then: {LOGIN}."
        )
    if isinstance(error, theirs.RepositoryNotFoundError):
        return ModelNotFoundError(f"{UNKNOWN.format(name=name)}.")
    if isinstance(error, theirs.RevisionNotFoundError):
        return ModelNotFoundError(f"{name} has no revision {repo.revision!r}.")
    if isinstance(error, theirs.EntryNotFoundError):
        return DownloadError(f"The hub lists a file of {repo} that it does not have; try again.")
    if isinstance(error, theirs.HfHubHTTPError):
        return _answered(error.response.status_code, repo)
    if isinstance(error, theirs.HTTPError):
        return DownloadError(
            f"The hub cannot be reached ({_first_line(error)}), and there is no folder {name!r} "
            "here. Check the network; `mlxinfer list` shows the models that are already here."
        )
    return _disk(error, repo)


def _answered(status: int, repo: RepoName) -> MlxinferError:
    if status == 404:
        return ModelNotFoundError(f"{UNKNOWN.format(name=repo.repo_id)}.")
    message = ANSWERS.get(status, f"The hub answered {status} for {repo}; try again later")
    return DownloadError(f"{message.format(name=repo.repo_id)}.")


def _disk(error: BaseException, repo: RepoName) -> MlxinferError:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        message = (
            f"The disk is full while downloading {repo}; what has arrived is kept. Make room, then "
            "run the same command again."
        )
    elif number == errno.ENOENT:
        message = (
            f"Somebody deleted files of {repo} in {cache_folder()} during the download; run the "
            "same command again."
        )
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        message = (
            f"{cache_folder()} cannot be written ({_first_line(error)}). Set HF_HOME to a folder "
            "of yours."
        )
    else:
        message = f"Downloading {repo} failed: {_first_line(error)}"
    return DownloadError(message)
