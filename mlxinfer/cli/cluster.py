"""`mlxinfer cluster`: several servers behind a router."""

import json
import os
from pathlib import Path
from typing import Any

import click

from ._options import API_KEY, json_option
from ._output import emit_json, table


@click.group()
def command() -> None:
    """List the servers that a router stands before."""


@command.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option("--mdns", is_flag=True, help="Add the servers that `serve --advertise` announces.")
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
    asked = cluster.ask(list(dict.fromkeys(found)), os.environ.get(API_KEY))
    entered = [worker for worker in asked if unchecked or worker.problem is None]
    if not entered:
        problems = "; ".join(f"{worker.url}: {worker.problem}" for worker in asked)
        raise click.ClickException(f"No server answers. {problems}")
    written = cluster.manifest(entered)
    if output is not None:
        _replace(output, written)
    if as_json or output is None:
        emit_json(written)
    rows = [(w.url, w.problem or ", ".join(w.models) or "no models") for w in asked]
    click.echo(table(rows, header=("SERVER", "MODELS")), err=True)


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write a file at once: a router that watches it never reads half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise click.ClickException(f"{path} cannot be written: {error}") from error
