"""Model names on the command line to LLMs, here or at a running server."""

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from ..backend import require_mlx
from ..errors import InvalidRequestError, ServerError, shown
from ._options import API_KEY
from ._output import note
from .running import default_url

if TYPE_CHECKING:
    from ..llm import LLM

ADAPTER = "adapter"  # what the adapter of --adapter is called
ADDRESS = ("http://", "https://")  # how the address of a server begins
SERVER = "MLXINFER_SERVER"  # environment variable: the address of a server, or "off"
OFF = "off"
LOOK_S = 2.0  # that a server may take to say what it has


def open_llm(
    name: str, *, adapter: str | None = None, local: bool = False, **arguments: Any
) -> "LLM":
    """Open a model at a running server that has it, or load it here, with an adapter.

    A model that is not on this disk is downloaded. An adapter, and options of an engine, are for a
    model that is loaded here.

    Args:
        name: of a model, a folder, or the address of a server.
    """
    from ..llm import LLM

    if name.startswith(ADDRESS):
        if adapter is not None:
            raise InvalidRequestError(
                f"--adapter is for a model here, and {shown(name)} is the address of a server; "
                "`mlxinfer serve --adapter` serves one.",
                param="adapter",
            )
        return LLM(name, **arguments)
    if not (local or adapter or arguments) and (served := _served(name)) is not None:
        url, served_model = served
        note(f"{name} answers from the server at {url}; --local loads it here")
        return LLM(url, served_model=served_model)
    require_mlx()
    llm = LLM(name, **arguments)
    if adapter is not None:
        try:
            llm.load_adapter(ADAPTER, adapter)
        except BaseException:  # also Ctrl-C: the memory is given back
            llm.close()
            raise
    return llm


def default_model(default: str, *, local: bool) -> str:
    """The model where none is named: the first of the server in MLXINFER_SERVER, or the default."""
    url = "" if local else named_server()
    return (first_name(url) if url else None) or default


def _served(name: str) -> tuple[str, str] | None:
    """The address of a server that has a model, and the model's name there."""
    url = named_server()
    if url == "":
        return None
    if url is not None:
        if (served := served_name(url, name)) is None:
            note(f"the server at {url} has no {name}: it is loaded here")
        return None if served is None else (url, served)
    try:
        url = default_url()
        served = served_name(url, name)
    except (click.UsageError, ServerError) as error:
        if isinstance(error, ServerError) and error.refused is not None:
            note(f"the server at {url} may have {name}, which is loaded here: {error}")
        return None
    return None if served is None else (url, served)


def _look(url: str, path: str) -> Any:
    """The JSON at a path of a server; raises as `exchange`."""
    from ..http_json import exchange

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
        cards = _look(url, "/v1/models")["data"]
        return [[card["id"], card["root"], *card["aliases"]] for card in cards]
    except (KeyError, TypeError):
        raise ServerError(f"What answers at {url} is no mlxinfer server.") from None


def _of_folder(url: str, folder: str) -> str | None:
    """The name of a folder's model. Only keys of administrators see the paths of a server."""
    if urlsplit(url).hostname not in ("127.0.0.1", "::1", "localhost"):
        return None
    path = os.path.abspath(folder)
    for model in _look(url, "/admin/state")["models"]:
        if model["source"] == path:
            return str(model["state"]["name"])
    return None
