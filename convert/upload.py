"""Uploads a finished folder to the hub, through huggingface_hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConversionError, DownloadError, InvalidRequestError, ModelNotFoundError
from ..hub.cache import offline, parse_repo_name
from ..hub.remote import LOGIN, endpoint
from .report import name_in_card


def check_repo(repo: str) -> None:
    """Before hours of work: whether `repo` can be the name of a repository, and there is a token.

    Raises:
        InvalidRequestError: it cannot.
        DownloadError: there is none, or the network is forbidden.
    """
    from huggingface_hub import get_token

    try:
        revision = parse_repo_name(repo).revision
    except ModelNotFoundError:
        revision = ""
    if revision != "main":
        raise InvalidRequestError(
            f"upload is {repo[:100]!r}; expected the name of a repository, org/name.",
            param="upload",
        )
    if offline():
        raise DownloadError("HF_HUB_OFFLINE forbids to upload; unset it, or leave out --upload.")
    if get_token() is None:
        raise DownloadError(f"Uploading needs a token of the hub: {LOGIN}.")


def upload(folder: Path, repo: str, *, private: bool = False, bars: bool = False) -> str:
    """Make the repository if need be, put the folder into it, and return its address.

    Files that an earlier try has uploaded are not sent again.

    Args:
        bars: huggingface_hub draws its progress.

    Raises:
        ConversionError: the folder is not a converted model.
        DownloadError: the hub could not be reached, or refused.
    """
    if not (folder / "report.json").is_file():
        raise ConversionError(f"{folder} has no report.json: it was not converted by mlxinfer.")
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not bars:
        disable_progress_bars()
    api = HfApi(endpoint=endpoint(), library_name="mlxinfer")
    name_in_card(folder, repo)
    with _failures(folder, repo):
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Converted by mlxinfer")
    return str(url)


@contextmanager
def _failures(folder: Path, repo: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise DownloadError(
                f"The hub does not let you write to {repo}: {LOGIN}, with a token that may write."
            ) from error
        raise DownloadError(_again(f"The hub answered {status}", folder)) from error
    except HTTPError as error:
        raise DownloadError(_again("The hub cannot be reached", folder)) from error
    except RuntimeError as error:  # what huggingface_hub wraps failures of single files in
        raise DownloadError(_again(str(error), folder)) from error


def _again(what: str, folder: Path) -> str:
    return f"{what.rstrip('.')}; {folder} is complete, so try again with --upload-only."
