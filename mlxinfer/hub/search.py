"""Search of the hub for models that can run here. Asks the network; downloads nothing."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..errors import DownloadError
from .cache import offline
from .fetch import patiently
from .remote import endpoint

MAX_FOUND = 30
EXPANDED = ["downloads", "likes", "lastModified", "safetensors", "gated", "pipeline_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A repository of the hub."""

    name: str
    downloads: int  # of the last month
    likes: int
    updated_s: float | None  # since 1970
    parameters: int | None
    gated: bool  # downloads need a token of an account that was let in


def search_models(words: str, *, mlx_only: bool = True) -> list[FoundModel]:
    """Repositories with safetensors whose names hold the words, the most downloaded first.

    Args:
        words: what to look for; "": the most downloaded of all.
        mlx_only: only those that were converted for MLX.

    Raises:
        DownloadError: the hub could not be reached, or refused.
    """
    if offline():
        raise DownloadError("HF_HUB_OFFLINE forbids to search the hub.")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi(endpoint=endpoint(), library_name="mlxinfer")

    def ask() -> list[Any]:
        return list(
            api.list_models(
                search=words or None,
                filter=["safetensors", *(["mlx"] if mlx_only else [])],
                sort="downloads",
                limit=MAX_FOUND,
                expand=EXPANDED,
            )
        )

    try:
        found = patiently(ask)
    except (HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DownloadError(f"The hub cannot be searched ({reason}). Check the network.") from error
    return [_found(info) for info in found]


def _found(info: Any) -> FoundModel:
    updated = info.last_modified
    if isinstance(updated, datetime):
        updated = updated.replace(tzinfo=updated.tzinfo or UTC).timestamp()
    return FoundModel(
        name=info.id,
        downloads=info.downloads or 0,
        likes=info.likes or 0,
        updated_s=updated,
        parameters=info.safetensors.total if info.safetensors else None,
        gated=bool(info.gated),
    )
