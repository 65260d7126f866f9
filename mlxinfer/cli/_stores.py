"""What `mlxinfer serve` keeps and sends: stored responses, files of batches, spans of answers."""

import sqlite3
from typing import TYPE_CHECKING, Any

import click

from ..configfile import parse_duration
from ..errors import InvalidRequestError
from ._output import note

if TYPE_CHECKING:
    from ..server.files import FileStore
    from ..server.store import ResponseStore
    from ..server.watch.tracing import Tracing


def response_store(options: dict[str, Any]) -> "ResponseStore | None":
    """Return the store of responses, or None; a value or a place that is wrong is wrong usage."""
    from ..history import data_folder
    from ..memory import parse_bytes
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
            f"Responses cannot be stored in {path}: {error}. Say --no-store, or set XDG_DATA_HOME."
        ) from error


def tracing(options: dict[str, Any]) -> "Tracing | None":
    """Return where spans of answers go, or None; without the extra it is wrong usage."""
    from ..server.watch.tracing import Tracing

    url = options.pop("otlp_traces_endpoint")
    try:
        return None if url is None else Tracing.to(url)
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from error


def file_store(options: dict[str, Any]) -> "FileStore | None":
    """Return the store of files, or None; a value or a place that is wrong is wrong usage."""
    from ..history import data_folder
    from ..memory import parse_bytes
    from ..server.files import FilesInUseError, FileStore

    keeps, size = options.pop("files"), options.pop("files_size")
    folder = data_folder() / "files"
    try:
        return FileStore(folder, max_bytes=parse_bytes(size)) if keeps else None
    except FilesInUseError:
        note(f"Another server takes files in {folder}, so this one takes none.")
        return None
    except (OSError, sqlite3.Error) as error:
        raise click.UsageError(
            f"Files cannot be kept in {folder}: {error}. Say --no-files, or set XDG_DATA_HOME."
        ) from error
