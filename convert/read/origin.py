"""Where a checkpoint comes from and how it may be used, as its card or its metadata say.

Of a card only a few keys in front of the text are read: what is to be passed on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CARD = "README.md"
_FRONT = re.compile(r"\A\s*---\n(.*?)\n---", re.S)
_CACHED = re.compile(r"^models--([^/]+?)--([^/]+)$")
_URL = re.compile(r"^https://huggingface\.co/([^/\s]+/[^/\s]+)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from; None: nothing says so. The card of a conversion repeats it."""

    repo: str | None = None  # of the checkpoint itself
    base_model: str | None = None  # that the checkpoint is made of
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


def origin_of_card(text: str, repo: str | None = None) -> Origin:
    """The origin that a model card states; the card may be no YAML at all."""
    front = _FRONT.match(text.replace("\r\n", "\n"))
    lines = front[1] if front else ""
    keys = ("base_model", "license", "license_name", "license_link")
    return Origin(repo, **{key: _value(lines, key) for key in keys})


def origin_of_folder(folder: Path) -> Origin:
    """Of a folder with a card; in the cache of the hub the folder's path names its repository."""
    cached = (_CACHED.match(part) for part in folder.resolve().parts)
    repo = next((f"{match[1]}/{match[2]}" for match in cached if match), None)
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return origin_of_card(text, repo)


def origin_of_metadata(metadata: Mapping[str, Any]) -> Origin:
    """Of a GGUF file."""
    url = _URL.match(str(metadata.get("general.base_model.0.repo_url", "")))
    keys = ("license", "license_name", "license_link")
    found = {key: metadata.get(f"general.{key.replace('_', '.')}") for key in keys}
    stated = {key: value for key, value in found.items() if isinstance(value, str)}
    return Origin(base_model=url[1] if url else None, **stated)


def _value(lines: str, key: str) -> str | None:
    """A key's value, or the first of a list."""
    found = re.search(rf"^{key}:[ \t]*(?:\n[ \t]*-[ \t]*)?([^\n]+)$", lines, re.M)
    value = found[1].strip().strip("'\"[]").strip() if found else ""
    return value if value and len(value) <= 300 and ":" not in value[:5] else None
