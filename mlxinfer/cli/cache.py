"""`mlxinfer cache`: the size of the disk cache of KV pages, and its deletion. No mlx."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..config import default_disk_folder
from ..memory import human_bytes
from ._options import json_option
from ._output import emit_json, table

_FOLDER = re.compile("[0-9a-f]{40}")
_FILE = re.compile(r"[0-9a-f]{40}\.(kv|[0-9a-f]+\.tmp)")  # entries, and what a crash left of some

_dir_option = click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the cache.  [default: ~/.cache/mlxinfer/kv]",
)


@click.group()
def command() -> None:
    """Show or clear what --disk-cache keeps."""


@command.command()
@_dir_option
@json_option
def info(folder: Path | None, as_json: bool) -> None:
    """Show what the cache takes.

    A namespace is one model in one KV format.
    """
    folder = folder or default_disk_folder()
    spaces = [(space.name, len(files), _bytes(files)) for space, files in _spaces(folder)]
    total = sum(size for *_, size in spaces)
    if as_json:
        keys = ("name", "entries", "bytes")
        parts = [dict(zip(keys, space, strict=True)) for space in spaces]
        emit_json({"dir": str(folder), "bytes": total, "namespaces": parts})
        return
    click.echo(f"{folder}: {human_bytes(total)}")
    if spaces:
        rows = [(name[:12], str(count), human_bytes(size)) for name, count, size in spaces]
        click.echo(table(rows, header=("NAMESPACE", "ENTRIES", "SIZE")))


@command.command()
@_dir_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(folder: Path | None, yes: bool, as_json: bool) -> None:
    """Delete the cache, of all models. What runs meanwhile computes again what it misses."""
    folder = folder or default_disk_folder()
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("Nobody is here to be asked; add --yes.")
        if not click.confirm(f"Delete the KV pages in {folder}?", err=True):
            raise click.exceptions.Exit(1)
    freed = 0
    for space, files in _spaces(folder):
        freed += _bytes(files)
        for file in files:
            file.unlink(missing_ok=True)
        if not any(space.iterdir()):
            space.rmdir()
    if as_json:
        emit_json({"dir": str(folder), "freed_bytes": freed})
    else:
        click.echo(f"Deleted the KV pages in {folder}, {human_bytes(freed)} freed")


def _spaces(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Return the namespaces of a cache and the files of each; foreign names are left out."""
    for space in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _FOLDER.fullmatch(space.name) and space.is_dir() and not space.is_symlink():
            yield space, [file for file in space.iterdir() if _FILE.fullmatch(file.name)]


def _bytes(files: list[Path]) -> int:
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a process that uses the cache deleted it
            total += file.lstat().st_size
    return total
