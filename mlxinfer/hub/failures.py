"""Failures of the hub, the network and the disk as this package's errors, and what is retried."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import DownloadError, MlxinferError, ModelNotFoundError
from .cache import RepoName, cache_folder

LOGIN = "hf auth login (or set HF_TOKEN)"
MAX_TRIES = 3
RETRY_WAIT_S = 1.0  # doubled with each failure
MAX_WAIT_S = 60.0
TRANSIENT = (408, 429, 500, 502, 503, 504)
Found = TypeVar("Found")

UNKNOWN = (
    "The hub has no {name}, or it is private. Check the spelling; for a private model: " + LOGIN
)
ANSWERS = {  # HTTP status -> message
    401: "The hub did not accept your token for {name}: " + LOGIN,
    403: "The hub does not let you read {name}: ask for access at https://huggingface.co/{name}, "
    "then " + LOGIN,
    429: "The hub limits how often you may ask: wait a while; more is allowed after " + LOGIN,
}


@contextmanager
def hub_failures(repo: RepoName) -> Iterator[None]:
    """Turn errors of the network, the hub and the disk into ModelNotFoundError or DownloadError."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except MlxinferError:
        raise
    except (HTTPError, OSError, HFValidationError) as error:
        raise _translate(error, repo) from error


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
    """Whether another try may succeed."""
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code in TRANSIENT


def wait_s(error: Exception, failures: int) -> float:
    """Return how long to wait after so many failures in a row; the hub may ask for more."""
    from huggingface_hub.errors import HfHubHTTPError

    seconds = RETRY_WAIT_S * 2 ** (failures - 1)
    if isinstance(error, HfHubHTTPError):
        asked = error.response.headers.get("Retry-After", "")
        seconds = max(seconds, float(asked)) if asked.isdecimal() else seconds
    return min(seconds, MAX_WAIT_S)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _translate(error: BaseException, repo: RepoName) -> MlxinferError:
    from huggingface_hub import errors as theirs

    name = repo.repo_id
    if isinstance(error, theirs.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _translate(error.__cause__, repo)
    if isinstance(error, theirs.GatedRepoError):
        return DownloadError(
            f"{name} is gated: ask for access at https://huggingface.co/{name}, then {LOGIN}."
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
            f"The hub cannot be reached ({first_line(error)}), and there is no folder {name!r} "
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
            f"{cache_folder()} cannot be written ({first_line(error)}). Set HF_HOME to a folder "
            "of yours."
        )
    else:
        message = f"Downloading {repo} failed: {first_line(error)}"
    return DownloadError(message)
