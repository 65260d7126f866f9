"""`mlxinfer load`: load a model in a running server before a request needs it."""

import click

from ..memory import human_bytes
from ._options import json_option
from ._output import emit_json
from ._remote import ask, url_option

LOAD_S = 1800.0  # that a model of hundreds of gigabytes may take from a slow disk


@click.command()
@click.argument("name")
@url_option
@json_option
def command(name: str, url: str | None, as_json: bool) -> None:
    """Let a running server load its model NAME.

    Waits until it is there. A model that could not be loaded before is tried again.
    """
    reply = ask(url, "/admin/models/load", {"model": name}, timeout_s=LOAD_S)
    if as_json:
        emit_json(reply)
        return
    click.echo(
        f"{reply['name']} is {reply['state']}: {human_bytes(reply['weights_bytes'])} of weights, "
        f"up to {human_bytes(reply['kv_bytes'])} of KV cache"
    )
