"""`mlxinfer session`: prompts of a running server that are kept under names."""

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from ..files import written_whole
from ..memory import human_bytes
from ._options import json_option
from ._output import emit, table, when
from .running import ask, url_option

SILENCE_S = 600.0  # while gigabytes are read and checked
PATH = "/v1/sessions"
slot_option = click.option("--slot", default=0, help="Number that requests gave as id_slot.")
model_option = click.option("-m", "--model", metavar="MODEL", help="Model of the server.")


@click.group()
def command() -> None:
    """Keep the context of an agent or a conversation for another day or another Mac.

    A session is the last prompt that a running server computed for you, with its answer. It is kept
    in the server's disk cache (--disk-cache) until you remove it. Requests that begin like it
    compute only what follows. The API key is MLXINFER_API_KEY.
    """


@command.command()
@click.argument("name")
@slot_option
@model_option
@url_option
@json_option
def save(name: str, slot: int, model: str | None, url: str | None, as_json: bool) -> None:
    """Keep the last prompt and its answer as NAME."""
    body = {"name": name, "id_slot": slot, "model": model}
    _say(ask(url, PATH, body, timeout_s=SILENCE_S), "Saved", as_json=as_json)


@command.command()
@click.argument("name")
@slot_option
@url_option
@json_option
def load(name: str, slot: int, url: str | None, as_json: bool) -> None:
    """Bring the session NAME into memory.

    Without this, the first request that begins like it reads it from the disk.
    """
    reply = ask(url, f"{_path(name)}/load", {"id_slot": slot}, timeout_s=SILENCE_S)
    _say(reply, "Loaded", as_json=as_json)


@command.command("list")
@url_option
@json_option
def list_command(url: str | None, as_json: bool) -> None:
    """List your sessions."""
    sessions = ask(url, PATH)["data"]
    rows = [
        (s["name"], s["model"], f"{s['tokens']:,}", human_bytes(s["bytes"]), when(s["created"]))
        for s in sessions
    ]
    header = ("NAME", "MODEL", "TOKENS", "SIZE", "SAVED")
    emit(sessions, table(rows, header=header), as_json=as_json)


@command.command()
@click.argument("name")
@url_option
def rm(name: str, url: str | None) -> None:
    """Remove the session NAME."""
    ask(url, _path(name), method="DELETE")
    click.echo(f"Removed {name}")


@command.command()
@click.argument("name")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@url_option
def export(name: str, file: Path, url: str | None) -> None:
    """Write the session NAME to FILE, for another Mac with the same model."""
    with written_whole(file) as new:
        ask(url, f"{_path(name)}/file", download=new, timeout_s=SILENCE_S)
    click.echo(f"{file}: {human_bytes(file.stat().st_size)}")


@command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Name of the session.  [default: the one in the file]")
@model_option
@url_option
@json_option
def import_command(
    file: Path, name: str | None, model: str | None, url: str | None, as_json: bool
) -> None:
    """Take in the session of FILE. The server checks that it fits the model and is not damaged."""
    query = urlencode({k: v for k, v in {"name": name, "model": model}.items() if v is not None})
    with open(file, "rb") as given:
        reply = ask(url, f"{PATH}?{query}", method="PUT", upload=given, timeout_s=SILENCE_S)
    _say(reply, "Imported", as_json=as_json)


def _path(name: str) -> str:
    return f"{PATH}/{quote(name, safe='')}"


def _say(reply: dict[str, Any], done: str, *, as_json: bool) -> None:
    size = human_bytes(reply["bytes"])
    said = f"{done} {reply['name']}: {reply['tokens']:,} tokens of {reply['model']}, {size}"
    emit(reply, said, as_json=as_json)
