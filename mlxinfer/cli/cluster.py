"""`mlxinfer cluster`: several servers behind a router."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from ._options import API_KEY, json_option
from ._output import emit_json, escaped, note, table

SHOWN = 8  # models of a server in the table


@click.group()
def command() -> None:
    """List the servers that a router stands before."""


@command.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option(
    "--mdns",
    is_flag=True,
    help="Add the servers that `serve --advertise` announces; they get the key, whatever they are.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 60),
    default=3.0,
    show_default=True,
    help="How long --mdns listens.",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the file here."
)
@click.option("--unchecked", is_flag=True, help="Also enter servers that do not answer.")
@json_option
def workers(
    urls: tuple[str, ...],
    mdns: bool,
    seconds: float,
    output: Path | None,
    unchecked: bool,
    as_json: bool,
) -> None:
    """Write the file of workers for `smg launch --discovery-provider file`.

    \b
    mlxinfer cluster workers http://studio.local:8080 http://mini.local:8080 -o workers.json
    smg launch --discovery-provider file --discovery-file workers.json --policy cache_aware
    """
    from .. import cluster

    found = [*urls, *(cluster.discover(seconds) if mdns else ())]
    if not found:
        raise click.UsageError(
            "No server: name addresses, or start servers with --advertise and say --mdns."
        )
    asked = cluster.ask(found, os.environ.get(API_KEY))
    rows = [(w.url, escaped(w.problem) if w.problem else _names(w.models)) for w in asked]
    click.echo(table(rows, header=("SERVER", "MODELS")), err=True)
    entered = [worker for worker in asked if unchecked or worker.problem is None]
    if not entered:
        raise click.ClickException("No server answers as it should.")
    written = cluster.manifest(entered)
    if output is not None:
        _replace(output, written)
    if as_json or output is None:
        emit_json(written)
    if any(len(worker.models) > 1 for worker in entered):
        note("smg sends a server requests for one model, the first here: run a server for each.")


def _names(models: tuple[str, ...]) -> str:
    """The models of a server, as far as a table takes them."""
    more = [f"{len(models) - SHOWN} more"] if len(models) > SHOWN else []
    return ", ".join([*models[:SHOWN], *more]) or "no models"


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write a file at once: a router that watches it never reads half of it.

    A link stays one; a device or a pipe is written to, not replaced.
    """
    text = json.dumps(content, indent=2) + "\n"
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        said = error.strerror or str(error)
        raise click.ClickException(f"{path} cannot be written: {said}.") from error
    finally:  # after Ctrl-C too
        with suppress(OSError):
            partial.unlink(missing_ok=True)
