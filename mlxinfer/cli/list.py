"""`mlxinfer list`: the models on this disk."""

from datetime import UTC, datetime

import click

from .. import hub
from ..memory import human_bytes
from ._options import json_option
from ._output import emit_json, table


@click.command()
@json_option
def command(as_json: bool) -> None:
    """List bundled and downloaded models."""
    models = hub.list_models()
    if as_json:
        emit_json({"models": [_as_dict(model) for model in models]})
        return
    rows = [
        (
            model.name,
            human_bytes(model.size_bytes),
            f"{datetime.fromtimestamp(model.modified):%Y-%m-%d %H:%M}",
            _state(model),
        )
        for model in models
    ]
    click.echo(table(rows, header=("NAME", "SIZE", "MODIFIED", "STATE")))


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


def _state(model: hub.LocalModel) -> str:
    if not model.complete:
        return f"incomplete: mlxinfer pull {model.name}"
    return "bundled" if model.source == "bundled" else "ready"
