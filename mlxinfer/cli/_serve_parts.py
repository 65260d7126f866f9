"""What `mlxinfer serve` hands to its server: the page and the stored answers."""

import sqlite3
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..configfile import ModelEntry, parse_duration
from ..errors import HistoryError, InvalidRequestError
from ..history import PLACE, History, data_folder, default_place
from ..memory import parse_bytes
from ._configuration import RequestedModel, entry_of, origin_of

if TYPE_CHECKING:
    from ..server.page.library import Library
    from ..server.page.routes import PageRoutes, Setting
    from ..server.registry.slots import Entry
    from ..server.store import ResponseStore


def page_routes(
    ctx: click.Context,
    options: Mapping[str, Any],
    ttl_s: float | None,
    limit_bytes: int,
    *,
    history: bool,
) -> "PageRoutes":
    """Return the routes of the page; raises HistoryError where the history cannot be opened."""
    from ..server.page.routes import PageRoutes

    place = default_place() if history else None
    try:
        stored = None if place is None else History(place)
    except HistoryError as error:
        raise HistoryError(f"{error} Say --no-history, or name a file by {PLACE}.") from error
    return PageRoutes(stored, library(options, ttl_s, limit_bytes), settings(ctx))


def library(options: Mapping[str, Any], ttl_s: float | None, limit_bytes: int) -> "Library":
    """Return what the page does with models: engine options are those of the command line."""
    from ..server.page.library import Library
    from ._inspect import fit_of_repository

    def entry(name: str, source: str) -> "Entry":
        requested = RequestedModel(
            name=name, place=name, entry=ModelEntry(source=source), preload=False
        )
        return entry_of(requested, options, ttl_s)

    return Library(
        command=(sys.executable, "-m", "mlxinfer.cli"),
        converted=converted_folder(),
        added=data_folder() / "served.json",
        entry_of=entry,
        fit_of=lambda name: fit_of_repository(name, limit_bytes).as_dict(),
    )


def converted_folder() -> Path:
    """The folder of conversions that were made on the page."""
    return data_folder() / "models"


def settings(ctx: click.Context) -> "list[Setting]":
    """Return the options of `serve` as they are, with their origin; of keys only the number."""
    from ..server.page.routes import Setting

    found = []
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in ctx.params:
            continue
        value = ctx.params[name]
        if "api_key" in name:
            value = f"{len(value)} set" if value else None
        value = list(value) if isinstance(value, tuple) else value
        label = parameter.opts[-1].lstrip("-")
        found.append(Setting(name=label, value=value, origin=origin_of(ctx, parameter)))
    return found


def response_store(options: dict[str, Any]) -> "ResponseStore | None":
    """Return the store of responses, or None; a value or a place that is wrong is wrong usage."""
    from ..server.store import ResponseStore

    keeps, size, age = options.pop("store"), options.pop("store_size"), options.pop("store_age")
    if not keeps:
        return None
    path = data_folder() / "responses.db"
    try:
        return ResponseStore(path, max_bytes=parse_bytes(size), max_age_s=parse_duration(age))
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from error
    except (OSError, sqlite3.Error) as error:
        raise click.UsageError(
            f"Responses cannot be stored in {path}: {error}. Set store = false in the config file, or XDG_DATA_HOME."
        ) from error
