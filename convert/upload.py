"""A finished folder onto the hub, through huggingface_hub. Knows no tensors."""

import os
from pathlib import Path

from ..errors import ConversionError, DownloadError, InvalidRequestError
from ..hub.errors import LOGIN
from ..hub.names import parse_repo_name


def check_repo(repo: str) -> None:
    """Before hours of work: whether `repo` can be the name of a repository.

    Raises:
        InvalidRequestError: it cannot.
    """
    if parse_repo_name(repo).revision != "main":
        raise InvalidRequestError(f"{repo!r} names a revision; give org/name.", param="upload")


def upload(folder: Path, repo: str, *, private: bool = False) -> str:
    """Make the repository if need be, put the folder into it, and return its address.

    What an earlier try has uploaded is not sent again.

    Raises:
        ConversionError: the folder is not a converted model.
        DownloadError: the hub could not be reached, or refused.
    """
    if not (folder / "report.json").is_file():
        raise ConversionError(f"{folder} has no report.json: it was not converted by mlxinfer.")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="mlxinfer")
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Converted by mlxinfer")
    except LocalTokenNotFoundError as error:
        raise DownloadError(f"Uploading needs a token of the hub: {LOGIN}.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise DownloadError(
                f"The hub does not let you write to {repo}: {LOGIN}, with a token that may write."
            ) from error
        raise DownloadError(
            f"The hub answered {status} while {repo} was uploaded; {folder} is complete, so try "
            "again with --upload-only."
        ) from error
    except HTTPError as error:
        raise DownloadError(
            f"The hub cannot be reached; {folder} is complete, so try again with --upload-only."
        ) from error
    return str(url)
