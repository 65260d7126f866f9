"""Model names on the command line to LLMs, here or at a running server."""

from typing import TYPE_CHECKING, Any

import click

from ..backend import require_mlx
from ..errors import InvalidRequestError, ServerError, shown
from ._output import note
from .running import default_url

if TYPE_CHECKING:
    from ..llm import LLM

ADAPTER = "adapter"  # what the adapter of --adapter is called
ADDRESS = ("http://", "https://")  # how the address of a server begins


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
    from ..remote.find import first_name, named_server

    url = "" if local else named_server()
    return (first_name(url) if url else None) or default


def _served(name: str) -> tuple[str, str] | None:
    """The address of a server that has a model, and the model's name there."""
    from ..remote.find import named_server, served_name

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
