"""`mlxinfer list`: the models on this disk."""

import shlex
from datetime import UTC, datetime
from pathlib import Path

import click

from .. import hub
from ..hub.elsewhere import models_elsewhere
from ..memory import human_bytes
from ._options import json_option
from ._output import emit_json, table


@click.command()
@click.option(
    "--folder",
    "folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    help="Look there too; repeatable. MLXINFER_MODELS names such folders for good.",
)
@json_option
def command(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the models on this disk.

    Those of LM Studio, Ollama and other folders are found too. A model of another program is used
    by its path; one in the GGUF format is converted first.
    """
    found = [*hub.list_models(), *models_elsewhere(list(folders))]
    models, files = ([m for m in found if m.gguf is gguf] for gguf in (False, True))
    if as_json:
        gguf = [{**_as_dict(model), "convert": _convert(model)} for model in files]
        emit_json(
            {"models": [_as_dict(model) for model in models], **({"gguf": gguf} if gguf else {})}
        )
        return
    rows = [
        (_short(model.name), human_bytes(model.size_bytes), _when(model.modified), _state(model))
        for model in [*models, *files]
    ]
    click.echo(table(rows, header=("NAME", "SIZE", "MODIFIED", "STATE")))
    if files:
        click.echo("\nGGUF files are converted before they run, for example:")
        click.echo(f"  {_convert(files[0])}")


def _convert(model: hub.LocalModel) -> str:
    out = model.name.rpartition("/")[2].removesuffix(".gguf").replace(":", "-")
    return f"mlxinfer convert {shlex.quote(str(model.path))} {shlex.quote(out)}"


def _as_dict(model: hub.LocalModel) -> dict[str, object]:
    return {
        "name": model.name,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "files": model.files,
        "modified": datetime.fromtimestamp(model.modified, UTC).isoformat(timespec="seconds"),
        "complete": model.complete,
        "source": model.source,
    }


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _short(name: str) -> str:
    """A path below the home folder from there, as a shell reads it."""
    home = str(Path.home())
    return f"~{name.removeprefix(home)}" if name.startswith(f"{home}/") else name


def _state(model: hub.LocalModel) -> str:
    if model.gguf:
        return f"GGUF, {model.source}"
    if not model.complete:
        local = model.source not in ("cache", "bundled")
        return "incomplete" if local else f"incomplete: mlxinfer pull {model.name}"
    return {"bundled": "bundled", "cache": "ready"}.get(model.source, f"ready, {model.source}")
