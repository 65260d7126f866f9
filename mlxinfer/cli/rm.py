"""`mlxinfer rm`: delete downloaded models."""

import sys

import click

from .. import hub
from ..memory import human_bytes
from ._options import complete_models, json_option
from ._output import emit_json


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_models)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def command(names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete downloaded models.

    org/name@revision deletes one revision only.
    """
    wanted = list(dict.fromkeys(names))  # a name given twice is there to be deleted once
    for name in wanted:
        hub.check_removable(name)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("Nobody is here to be asked; add --yes.")
        if not click.confirm(f"Delete {', '.join(wanted)}?", err=True):
            raise click.exceptions.Exit(1)
    removed = []
    for name in wanted:
        freed = hub.remove(name)
        removed.append({"name": name, "freed_bytes": freed})
        if not as_json:
            click.echo(f"Deleted {name}, {human_bytes(freed)} freed")
    if as_json:
        emit_json({"removed": removed})
