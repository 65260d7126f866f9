"""The user's settings in one JSON file. Only this user can read it, since it may hold a key."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Choices of the user. Nothing starts by itself unless it is asked for here."""

    url: str = "http://127.0.0.1:8080"
    key: str = ""  # of the server; empty: none
    start_server: bool = False  # when the app starts
    stop_server: bool = False  # that the app started, when the app is quit
    models_folder: str = ""  # of a server that the app starts; empty: the hub's usual one
    hotkey: str = "ctrl+shift+space"  # of the chat window; empty: none
    show_rate: bool = False  # tokens a second beside the icon
    hide_icon: bool = False
    introduced: bool = False  # the first run is over


def load(path: Path) -> Settings:
    """The stored settings; a field that is missing or of another type has its default."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Settings()
    defaults = asdict(Settings())
    known = {field.name for field in fields(Settings)}
    given = stored.items() if isinstance(stored, dict) else ()
    return Settings(
        **{name: v for name, v in given if name in known and type(v) is type(defaults[name])}
    )


def save(path: Path, settings: Settings) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(settings), indent=2).encode())
