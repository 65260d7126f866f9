"""What huggingface_hub raises -> our errors, with what to do. Knows no requests, no files."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DownloadError, MlxinferError, ModelNotFoundError
from .names import RepoName, cache_folder

LOGIN = "hf auth login (or set HF_TOKEN)"


@contextmanager
def hub_failures(repo: RepoName) -> Iterator[None]:
    """Turn what goes wrong inside into ModelNotFoundError or DownloadError.

    Only errors of the network, the hub and the disk: all of them are OSErrors or the HTTP
    library's. Bugs pass through.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except MlxinferError:
        raise
    except (HTTPError, OSError, HFValidationError) as error:
        raise translate(error, repo) from error


def translate(error: BaseException, repo: RepoName) -> MlxinferError:
    """The error of ours that tells a user about `error`."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return translate(error.__cause__, repo)
    if isinstance(error, GatedRepoError):
        return DownloadError(
            f"{repo.repo_id} is gated: ask for access at https://huggingface.co/{repo.repo_id}, "
            f"then {LOGIN}."
        )
    if isinstance(error, RepositoryNotFoundError):
        return _unknown(repo)
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{repo.repo_id} has no revision {repo.revision!r}.")
    if isinstance(error, EntryNotFoundError):
        return DownloadError(f"The hub lists a file of {repo} that it does not have; try again.")
    if isinstance(error, HfHubHTTPError):
        return _answered(error.response.status_code, repo)
    if isinstance(error, HTTPError):
        return DownloadError(
            f"The hub cannot be reached ({_first_line(error)}), and there is no folder "
            f"{repo.repo_id!r} here. Check the network; `mlxinfer list` shows the models that are "
            "already here."
        )
    return _disk(error, repo)


def _unknown(repo: RepoName) -> MlxinferError:
    return ModelNotFoundError(
        f"The hub has no {repo.repo_id}, or it is private. Check the spelling; "
        f"for a private model: {LOGIN}."
    )


def _answered(status: int, repo: RepoName) -> MlxinferError:
    if status == 401:
        return DownloadError(f"The hub did not accept your token for {repo.repo_id}: {LOGIN}.")
    if status == 403:
        return DownloadError(
            f"The hub does not let you read {repo.repo_id}: ask for access at "
            f"https://huggingface.co/{repo.repo_id}, then {LOGIN}."
        )
    if status == 404:
        return _unknown(repo)
    if status == 429:
        return DownloadError(
            f"The hub limits how often you may ask: wait a while; more is allowed after {LOGIN}."
        )
    return DownloadError(f"The hub answered {status} for {repo}; try again later.")


def _disk(error: BaseException, repo: RepoName) -> MlxinferError:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"The disk is full while downloading {repo}; what has arrived is kept. Make room, then "
            "run the same command again."
        )
    if number == errno.ENOENT:
        return DownloadError(
            f"Somebody deleted files of {repo} in {cache_folder()} during the download; run the "
            "same command again."
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DownloadError(
            f"{cache_folder()} cannot be written ({_first_line(error)}). Set HF_HOME to a folder "
            "of yours."
        )
    return DownloadError(f"Downloading {repo} failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
