"""The config file of the server: its location and its content, without the options' meanings.

# ~/.config/mlxinfer/config.toml
[serve]                     # options of `mlxinfer serve`, by their long names
port = 8080
max-memory = "24GB"         # weights and KV caches of all loaded models

[models.chat]               # a model by the name that requests use
source = "mlx-community/Qwen3-8B-4bit"
aliases = ["gpt-4o-mini"]
pin = true                  # loaded at the start, and never unloaded
ttl = "30m"                 # unloaded after so long without a request
kv-bits = "8"               # engine options of this model alone
max-memory = "4GB"          # of its KV cache; without it a share of the server's

[mcp.files]                 # an MCP server whose tools `mlxinfer chat` and the page offer
command = ["npx", "-y", "@modelcontextprotocol/server-filesystem", "/Users/me/notes"]
allow = ["read_text_file"]  # tools that are called without asking
"""

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError

VARIABLE = "MLXINFER_CONFIG"
MAX_BYTES = 1 << 20
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model as the config file describes it."""

    source: str  # a bundled model, a folder or a hub repository
    aliases: tuple[str, ...] = ()
    pin: bool = False
    ttl_s: float | None = None  # None: the server's own
    # of its engine, as on the command line
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServer:
    """An MCP server: a program that is started, or an address."""

    command: tuple[str, ...] = ()  # the program and its arguments; empty: there is an address
    url: str = ""  # of a server that runs already, such as http://127.0.0.1:9000/mcp
    # variables of the program's environment, beside the usual ones
    env: Mapping[str, str] = field(default_factory=dict)
    allow: tuple[str, ...] = ()  # names of tools that are called without asking


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The content of a config file."""

    path: Path | None = None  # None: no file
    serve: Mapping[str, Any] = field(default_factory=dict)  # by the options' Python names
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    mcp: Mapping[str, ToolServer] = field(default_factory=dict)


def find_config_file() -> Path | None:
    """The first of MLXINFER_CONFIG, the user's file and the machine's file; None: no file.

    Raises:
        InvalidRequestError: MLXINFER_CONFIG names a file that does not exist.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise InvalidRequestError(f"{VARIABLE} names {named}, which is no file.")
        return path
    return next((path for path in standard_places() if path.is_file()), None)


def standard_places() -> list[Path]:
    """The standard paths of a config file, in order of precedence."""
    home = os.environ.get("XDG_CONFIG_HOME")
    places = [(Path(home).expanduser() if home else Path.home() / ".config") / "mlxinfer"]
    if sys.platform == "darwin":
        places.append(Path("/Library/Application Support/mlxinfer"))
    else:
        places.append(Path("/etc/mlxinfer"))
    return [place / "config.toml" for place in places]


def read_config_file(path: Path | None) -> ConfigFile:
    """Read and check a config file; None gives an empty one.

    Raises:
        InvalidRequestError: it cannot be read, is not TOML, or has unknown tables or wrong types.
    """
    if path is None:
        return ConfigFile()
    document = _parse(path)
    for name in document:
        if name not in ("serve", "models", "mcp"):
            have = "a table [serve] and tables [models.NAME] and [mcp.NAME]"
            raise _wrong(path, name, f"a file has {have}, no more")
    serve = _table(path, "serve", document.get("serve", {}))
    tables = _table(path, "models", document.get("models", {}))
    models = {name: _model(path, name, entry) for name, entry in tables.items()}
    _check_names(path, models)
    servers = _table(path, "mcp", document.get("mcp", {}))
    return ConfigFile(
        path=path,
        serve={name.replace("-", "_"): value for name, value in serve.items()},
        models=models,
        mcp={name: _tool_server(path, name, entry) for name, entry in servers.items()},
    )


def parse_duration(value: object) -> float:
    """Seconds of `90`, `"90s"`, `"30m"`, `"2h"` or `"1d"`.

    Raises:
        InvalidRequestError: it is not a duration.
    """
    if type(value) in (int, float) and value >= 0:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise InvalidRequestError(
            f"{value!r} is no duration; expected seconds, or such as '90s', '30m', '2h', '1d'."
        )
    return float(match[1]) * _SECONDS[match[2]]


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise InvalidRequestError(f"{path} has over {MAX_BYTES >> 20} MiB: no config file.")
        return tomllib.loads(raw.decode())
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidRequestError(f"{path} is no TOML: {error}.") from error


def _model(path: Path, name: str, entry: object) -> ModelEntry:
    place = f"models.{name}"
    given = dict(_table(path, place, entry))
    source = given.pop("source", None)
    if not isinstance(source, str) or not source:
        near = get_close_matches("source", given, n=1)
        hint = f", not {near[0]!r}" if near else ""
        need = "it needs a source: a folder, org/name, or a bundled model"
        raise _wrong(path, place, need + hint)
    aliases = _names(path, f"{place}.aliases", given.pop("aliases", []))
    pin = given.pop("pin", False)
    if not isinstance(pin, bool):
        raise _wrong(path, f"{place}.pin", "expected true or false")
    ttl = given.pop("ttl", None)
    try:
        ttl_s = None if ttl is None else parse_duration(ttl)
    except InvalidRequestError as error:
        raise _wrong(path, f"{place}.ttl", str(error).rstrip(".")) from error
    options = {key.replace("-", "_"): value for key, value in given.items()}
    return ModelEntry(source=source, aliases=aliases, pin=pin, ttl_s=ttl_s, options=options)


def _tool_server(path: Path, name: str, entry: object) -> ToolServer:
    place = f"mcp.{name}"
    given = dict(_table(path, place, entry))
    command = _names(path, f"{place}.command", given.pop("command", []))
    url, env = given.pop("url", ""), _table(path, f"{place}.env", given.pop("env", {}))
    allow = _names(path, f"{place}.allow", given.pop("allow", []))
    if given:
        raise _wrong(path, f"{place}.{next(iter(given))}", "known are command, url, env, allow")
    if not isinstance(url, str):
        raise _wrong(path, f"{place}.url", "expected a text")
    if bool(command) == bool(url):
        raise _wrong(path, place, "it needs either a command (a list of texts) or a url")
    if not all(isinstance(value, str) for value in env.values()):
        raise _wrong(path, f"{place}.env", "expected texts")
    return ToolServer(command=command, url=url, env=env, allow=allow)


def _names(path: Path, place: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise _wrong(path, place, "expected a list of texts")
    return tuple(value)


def _check_names(path: Path, models: Mapping[str, ModelEntry]) -> None:
    """Raise InvalidRequestError for a name or alias that occurs twice."""
    taken: set[str] = set()
    for name, entry in models.items():
        for called in (name, *entry.aliases):
            if called in taken:
                raise _wrong(path, f"models.{name}", f"a model is called {called} already")
            taken.add(called)


def _table(path: Path, place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, place, "expected a table")
    return value


def _wrong(path: Path, place: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}, {place}: {what}.", param=place)
