"""`mlxinfer unload`: free a model's memory in a running server."""

import click

from ._options import json_option
from ._output import emit_json
from ._remote import ask, url_option

UNLOAD_S = 120.0  # beside the time to drain


@click.command()
@click.argument("name")
@click.option(
    "--drain",
    "drain_s",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 3600),
    help="Seconds that its requests get to end; it stays if they do not.",
)
@url_option
@json_option
def command(name: str, drain_s: float, url: str | None, as_json: bool) -> None:
    """Let a running server unload its model NAME.

    One that answers requests stays.
    """
    body = {"model": name, "drain_s": drain_s}
    reply = ask(url, "/admin/models/unload", body, timeout_s=drain_s + UNLOAD_S)
    if as_json:
        emit_json(reply)
        return
    click.echo(f"{reply['name']} is {reply['state']}")
