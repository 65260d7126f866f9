"""What a model may be called, and which folder of the hub cache is meant. Knows no network."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelNotFoundError

ASSETS = Path(__file__).parent.parent / "assets"
BUNDLED = ("demo", "demo-draft")

_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[\w])?"
_REPO = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[\w][\w./-]{{0,126}}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepoName:
    """A repository of the hub, at a branch, tag or commit."""

    repo_id: str  # org/name
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo_id if self.revision == "main" else f"{self.repo_id}@{self.revision}"

    @property
    def folder(self) -> Path:
        """Where the hub cache keeps this repository, whether it is there or not."""
        return cache_folder() / ("models--" + self.repo_id.replace("/", "--"))


def parse_repo_name(name: str) -> RepoName:
    """Read `org/name` or `org/name@revision`.

    Raises:
        ModelNotFoundError: it cannot be the name of a repository.
    """
    match = _REPO.fullmatch(name)
    if match is None or ".." in name or "--" in match["repo"] or match["repo"].endswith(".git"):
        raise ModelNotFoundError(
            f"{_shown(name)} is not a model name. Expected "
            f"{' or '.join(repr(bundled) for bundled in BUNDLED)} (bundled), an existing folder, "
            "or a Hugging Face repository as org/name or org/name@revision."
        )
    return RepoName(match["repo"], match["revision"] or "main")


def cache_folder() -> Path:
    """The hub cache, as huggingface_hub finds it, but read now and not when it was imported."""
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(value)).expanduser() / below
    return Path.home() / ".cache/huggingface/hub"


def offline() -> bool:
    """Whether the user forbade network access (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:99] + "…")
