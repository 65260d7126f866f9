"""Requests of commands to a running server; its address follows from options and config file."""

import os
from typing import Any
from urllib.parse import urlsplit

import click

from ._options import API_KEY

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
url_option = click.option(
    "--url",
    metavar="URL",
    help="Of the server.  [default: as `mlxinfer serve` is set up: config file, MLXINFER_SERVE_*]",
)


def ask(url: str | None, path: str, body: Any = None, *, timeout_s: float = 10.0) -> Any:
    """GET a path of a server, or POST a body to it; return the JSON of the answer.

    The key is MLXINFER_API_KEY.

    Args:
        url: of the server; None: where `mlxinfer serve` would listen.
        path: such as "/admin/models".
        body: JSON; None: GET.
        timeout_s: longest silence.

    Raises:
        ServerError: there is no server, another program answers, or the server refused.
    """
    from ..http_json import NoServerError, exchange  # slow; not for commands only listed

    base = (url or default_url()).rstrip("/").removesuffix("/v1")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"{base} is no address of a server; one looks like http://host:8080")
    try:
        return exchange(base, path, body, key=os.environ.get(API_KEY), timeout_s=timeout_s)
    except NoServerError as error:
        raise NoServerError(
            f"{error} Start one with `mlxinfer serve`, or say where it is with --url."
        ) from None


def default_url() -> str:
    """Return the address at which `mlxinfer serve` without arguments listens."""
    from .config import serve_context

    options = serve_context([]).params
    first = options["host"][0]
    host = ANY_ADDRESS.get(first, first)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{options['port']}"
