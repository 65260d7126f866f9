"""Finds a model that a running server has."""

import os
from typing import Any
from urllib.parse import urlsplit

from ..errors import ServerError
from ..http_json import exchange
from .session import API_KEY

SERVER = "MLXINFER_SERVER"  # environment variable: the address of a server, or "off"
OFF = "off"
LOOK_S = 2.0  # that a server may take to say what it has


def ask(url: str, path: str) -> Any:
    """The JSON at a path of a server; raises as `exchange`."""
    return exchange(url, path, None, key=os.environ.get(API_KEY), timeout_s=LOOK_S)


def named_server() -> str | None:
    """The address in MLXINFER_SERVER without /v1; "": ask none; None: it says nothing."""
    url = os.environ.get(SERVER, "").strip()
    if url not in ("", OFF) and "://" not in url:
        raise ServerError(f"{SERVER} is {url!r}; expected an address with http://, or {OFF}.")
    return "" if url == OFF else url.rstrip("/").removesuffix("/v1") or None


def served_name(url: str, model: str) -> str | None:
    """The name by which a server has a model; None: it has not.

    Args:
        model: its name or alias there, the repository that it came from, or a folder of this
            machine, if the server is on it too.

    Raises:
        ServerError: no mlxinfer server answers, or it refused.
    """
    if os.path.isdir(os.path.expanduser(model)):
        return _of_folder(url, os.path.expanduser(model))
    return next((names[0] for names in _names(url) if model in names), None)


def first_name(url: str) -> str | None:
    """The name of a server's first model; raises as `served_name`."""
    return next((names[0] for names in _names(url)), None)


def _names(url: str) -> list[list[str]]:
    """Of each model of a server its name, and behind it other words for it."""
    try:
        cards = ask(url, "/v1/models")["data"]
        return [[card["id"], card["root"], *card["aliases"]] for card in cards]
    except (KeyError, TypeError):
        raise ServerError(f"What answers at {url} is no mlxinfer server.") from None


def _of_folder(url: str, folder: str) -> str | None:
    """The name of a folder's model. Only keys of administrators see the paths of a server."""
    if urlsplit(url).hostname not in ("127.0.0.1", "::1", "localhost"):
        return None
    path = os.path.abspath(folder)
    for model in ask(url, "/admin/state")["models"]:
        if model["source"] == path:
            return str(model["state"]["name"])
    return None
