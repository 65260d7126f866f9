"""`mlxinfer config`: the settings of `mlxinfer serve`, and where each comes from."""

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..config.file import VARIABLE, ConfigFile, find_config_file, standard_places
from ..files import write_whole
from ._configuration import PREFIX, config_of, shown_values
from ._options import json_option
from ._output import emit_json, table


@click.group()
def command() -> None:
    """Settings of `mlxinfer serve`.

    The command line counts most, then MLXINFER_SERVE_* variables, the config file, and defaults.
    """


@command.command()
def path() -> None:
    """Print the path of the config file, or the places that are searched."""
    file = find_config_file()
    if file is not None:
        click.echo(file)
        return
    click.echo(f"no config file; looked for {', '.join(map(str, standard_places()))}", err=True)
    raise click.exceptions.Exit(1)


TEMPLATE = """\
# Settings of `mlxinfer serve`. `mlxinfer config show --origin` shows each value and its origin.

[serve]
# port = 8080
# host = "127.0.0.1"     # "0.0.0.0" lets other machines in, with a key: api-key = ["..."]
# max-memory = "24GB"    # weights and KV caches of all loaded models
# ttl = "30m"            # models unload after so long without a request

# A model by the name that requests use; one table for each.
[models.demo]
source = "demo"          # bundled; or a folder, or org/name of the Hugging Face hub
# aliases = ["gpt-4o-mini"]
# pin = true             # loaded at the start, and never unloaded
# kv-bits = "8"          # engine options of this model alone
"""


@command.command()
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(force: bool) -> None:
    """Write a first config file with comments."""
    named = os.environ.get(VARIABLE)
    place = Path(named).expanduser() if named else standard_places()[0]
    if place.exists() and not force:
        raise click.UsageError(f"{place} is there; --force replaces it.")
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, TEMPLATE.encode())
    click.echo(place)


@command.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False),
    help="Read this config file instead.",
)
@click.option("--origin", is_flag=True, help="Also show where each value comes from.")
@json_option
def show(config_path: str | None, origin: bool, as_json: bool) -> None:
    """Print the settings that `mlxinfer serve` would use. Keys are not shown."""
    ctx = serve_context([] if config_path is None else ["--config", config_path])
    rows, config = shown_values(ctx), config_of(ctx)
    if as_json:
        emit_json(
            {
                "file": None if config.path is None else str(config.path),
                "serve": {name: {"value": value, "origin": said} for name, value, said in rows},
                "models": _models(config),
            }
        )
        return
    click.echo(f"# {config.path or 'no config file'}")
    header = ("OPTION", "VALUE", "ORIGIN") if origin else ("OPTION", "VALUE")
    lines = [(f"--{name}", _words(value), said)[: len(header)] for name, value, said in rows]
    click.echo(table(lines, header=header))
    for name, entry in _models(config).items():
        said = [f"{key}={_words(value)}" for key, value in entry.items() if value not in (None, [])]
        click.echo(f"model {name}: {', '.join(said)}")


def serve_context(arguments: list[str]) -> click.Context:
    """Return the parsed context of `mlxinfer serve` with these arguments; errors are wrong usage.

    Models are not searched for: they may be downloaded later.
    """
    from ._configuration import checked_settings, requested_models
    from .serve import command as serve

    ctx = serve.make_context("mlxinfer serve", arguments, auto_envvar_prefix=PREFIX)
    by_default = ctx.get_parameter_source("models") is ParameterSource.DEFAULT
    for requested in requested_models(ctx.params["models"], config_of(ctx), by_default=by_default):
        checked_settings(requested, {**ctx.params, "max_memory": None})  # which is the server's own
    return ctx


def _words(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _models(config: ConfigFile) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "source": entry.source,
            "aliases": list(entry.aliases),
            "pin": entry.pin,
            "ttl_s": entry.ttl_s,
            **entry.options,
        }
        for name, entry in config.models.items()
    }
