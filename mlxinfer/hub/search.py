"""Search of the hub for models that can run here. Asks the network; downloads nothing."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..errors import DownloadError
from .cache import offline
from .fetch import patiently
from .remote import METADATA_TIMEOUT_S, endpoint

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
    """Repositories with safetensors and the words in their names, the most downloaded first.

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
        found = patiently(lambda: _ask(words, mlx_only))
    except (HTTPError, OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DownloadError(f"The hub cannot be searched ({reason}). Check the network.") from error
    return [_found(info) for info in found]


def _ask(words: str, mlx_only: bool) -> list[dict[str, Any]]:
    """One request. HfApi.list_models would try again for half a minute while people wait."""
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
    if words:
        query["search"] = words
    answer = get_session().get(
        f"{endpoint() or ENDPOINT}/api/models",
        params=query,
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
