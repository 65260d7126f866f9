"""Commands for what is on this disk: `list`, `suggest`, `pull`, `rm` and `cache`. No mlx."""

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click

from .. import hub
from ..config import default_disk_folder
from ..errors import InsufficientMemoryError, MlxinferError
from ..memory import MODELS_SHARE, human_bytes, models_limit_bytes, parse_bytes, weights_bytes
from ..memory.suggestions import TASKS, Suggestion, by_balance, fitting
from ..progress import progress_bar
from ._model import say_how_to_try
from ._options import Size, complete_models, json_option, yes_option
from ._output import confirm, counted, emit, emit_json, fitted, human_count, note, table, when


@click.command()
@click.option(
    "--folder",
    "folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    help="Another folder to search; repeatable. MLXINFER_MODELS names folders to search always.",
)
@json_option
def list_command(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the models on this disk.

    Models of LM Studio, Ollama and other folders are listed too; use them by their paths.
    """
    listed = [*hub.list_models(), *hub.models_elsewhere(list(folders))]
    models, files = ([m for m in listed if m.gguf is gguf] for gguf in (False, True))
    if as_json:
        gguf = [{**_as_dict(model), "convert": _convert(model)} for model in files]
        emit_json(
            {"models": [_as_dict(model) for model in models], **({"gguf": gguf} if gguf else {})}
        )
        return
    rows = [
        (_short(model.name), human_bytes(model.size_bytes), when(model.modified), _state(model))
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
        **({"problem": model.problem} if model.problem else {}),
    }


def _short(name: str) -> str:
    home = f"{Path.home()}/"
    quoted = shlex.quote(name.removeprefix(home))
    return f"~/{quoted}" if name.startswith(home) else quoted


def _state(model: hub.LocalModel) -> str:
    if model.gguf:
        return f"GGUF, {model.source}"
    if model.problem:
        return f"cannot be read: {model.problem}"
    if not model.complete:
        local = model.source not in ("cache", "bundled")
        return "incomplete" if local else f"incomplete: mlxinfer pull {model.name}"
    return {"bundled": "bundled", "cache": "ready"}.get(model.source, f"ready, {model.source}")


# -- downloads ------------------------------------------------------------------------------------


@click.command()
@click.argument("name", shell_complete=complete_models)
@click.option("--dry-run", is_flag=True, help="Show what would be downloaded, and whether it fits.")
@json_option
def pull(name: str, dry_run: bool, as_json: bool) -> None:
    """Download a model from the Hugging Face hub.

    NAME is org/name or org/name@revision. An interrupted download continues where it stopped.
    """
    if dry_run:
        _plan(name, as_json=as_json)
        return
    with progress_bar(f"download {name}") as progress:
        folder = hub.pull(name, progress=progress)
    if as_json:
        emit_json({"name": name, "path": str(folder), "size_bytes": weights_bytes(folder)})
    else:
        click.echo(f"{name} is in {folder}")
        if _fits(name, folder):
            say_how_to_try(name, folder)


def _fits(name: str, folder: Path) -> bool:
    """Whether a model may run here. One that is too large is noted: it may be converted."""
    from ..memory.fit import held_bytes, require_fit

    try:
        require_fit(name, folder, weights_bytes=held_bytes(folder))
    except InsufficientMemoryError as error:
        note(str(error))
        return False
    except MlxinferError:
        return False  # it may not run here; `show` says why
    return True


def _plan(name: str, *, as_json: bool) -> None:
    from ._inspect import fit_of_repository

    plan = hub.plan_pull(name)
    repo = plan.listing.repo
    fit = fit_of_repository(name, models_limit_bytes())
    data = {
        "name": str(repo),
        "commit": plan.listing.commit,
        "total_bytes": plan.total_bytes,
        "missing_bytes": plan.missing_bytes,
        "free_bytes": plan.free_bytes,
        "fit": fit.as_dict(),
        "files": [{"path": f.path, "size_bytes": f.size} for f in plan.files],
    }
    said = (
        f"{repo}: {human_bytes(plan.total_bytes)} in {counted(len(plan.files), 'file')}, "
        f"{human_bytes(plan.missing_bytes)} to download, "
        f"{human_bytes(plan.free_bytes)} free\n{fit.text}"
    )
    emit(data, said, as_json=as_json)
    plan.check_room()


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_models)
@yes_option
@json_option
def rm(names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete downloaded models.

    org/name@revision deletes one revision only.
    """
    wanted = list(dict.fromkeys(names))  # a name given twice is there to be deleted once
    for name in wanted:
        hub.check_removable(name)
    confirm(f"Delete {', '.join(wanted)}?", yes)
    removed = []
    for name in wanted:
        freed = hub.remove(name)
        removed.append({"name": name, "freed_bytes": freed})
        if not as_json:
            click.echo(f"Deleted {name}, {human_bytes(freed)} freed")
    if as_json:
        emit_json({"removed": removed})


# -- models that fit, from a small table of the library -------------------------------------------

WIDE = 130  # columns of a terminal that has room for the whole table


@click.command()
@click.option("--for", "task", type=click.Choice(TASKS), help="What the model should be good at.")
@click.option(
    "--memory", type=Size(), help="Memory of the machine, such as 32GB.  [default: this machine's]"
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=8192,
    help="Tokens of one conversation that must fit.",
)
@json_option
def suggest(task: str | None, memory: str | None, context: int, as_json: bool) -> None:
    """List models that fit this machine.

    The largest come first. The best balance leaves room for 16,384 tokens and for other programs.
    Sizes come from a table; nothing is downloaded.
    """
    limit = models_limit_bytes() if memory is None else int(MODELS_SHARE * parse_bytes(memory))
    suggestions = fitting(limit, context, task)
    pick = next(iter(by_balance(suggestions, limit, task or "chat")), None)
    if as_json:
        models = [
            {**suggestion.as_dict(limit), "pick": suggestion is pick} for suggestion in suggestions
        ]
        emit_json({"limit_bytes": limit, "models": models})
        return
    click.echo(f"{human_bytes(limit)} for models, weights and KV cache together\n", err=True)
    if pick is None:
        raise click.ClickException(
            f"No model of the table fits with {context:,} tokens of context."
        )
    header = ("MODEL", "WEIGHTS", "CONTEXT THAT FITS", "PARAMETERS", "FOR")
    shown = len(header) if shutil.get_terminal_size().columns >= WIDE else 3
    rows = [_row(suggestion, limit)[:shown] for suggestion in suggestions]
    click.echo(table(rows, header=header[:shown]))
    click.echo(fitted(f"\nBest balance of quality and room: {pick.name}"))
    click.echo(f"mlxinfer pull {pick.name}")
    click.echo(f"mlxinfer chat -m {pick.name}")


def _row(suggestion: Suggestion, limit: int) -> tuple[str, ...]:
    size = human_count(suggestion.parameters).replace(" ", "")
    if suggestion.active < suggestion.parameters:
        size += f" ({human_count(suggestion.active).replace(' ', '')} active)"
    longest = f"{suggestion.longest_context(limit):,} of {suggestion.context:,}"
    return (
        suggestion.name,
        human_bytes(suggestion.bytes),
        longest,
        size,
        ", ".join(suggestion.tasks),
    )


# -- the disk cache of KV pages -------------------------------------------------------------------

_FOLDER = re.compile(r"[0-9a-f]{40}(\.[0-9]+)?")  # a namespace, and the version of its entries
_FILE = re.compile(r"[0-9a-f]{40}\.(kv|[0-9a-f]+\.tmp)")  # entries, and what a crash left of some
_dir_option = click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_disk_folder,
    show_default=False,
    help="Folder of the cache.  [default: ~/.cache/mlxinfer/kv]",
)


@click.group(invoke_without_command=True)
@click.pass_context
def cache(ctx: click.Context) -> None:
    """Show or delete what --disk-cache keeps."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(info)


@cache.command()
@_dir_option
@json_option
def info(folder: Path, as_json: bool) -> None:
    """Show how much disk the cache takes.

    A namespace is one model with one KV format.
    """
    spaces = [
        (space.name.partition(".")[0], len(files), _bytes(files))
        for space, files in _spaces(folder)
    ]
    total = sum(size for *_, size in spaces)
    keys = ("name", "entries", "bytes")
    parts = [dict(zip(keys, space, strict=True)) for space in spaces]
    said = f"{folder}: {human_bytes(total)}"
    if spaces:
        rows = [(name[:12], str(count), human_bytes(size)) for name, count, size in spaces]
        said += f"\n{table(rows, header=('NAMESPACE', 'ENTRIES', 'SIZE'))}"
    emit({"dir": str(folder), "bytes": total, "namespaces": parts}, said, as_json=as_json)


@cache.command()
@_dir_option
@yes_option
@json_option
def clear(folder: Path, yes: bool, as_json: bool) -> None:
    """Delete the cache of all models, except saved sessions. Running servers keep working."""
    confirm(f"Delete the KV pages in {folder}?", yes)
    freed = 0
    for space, entries in _spaces(folder):
        files = [file for file in entries if file.lstat().st_nlink == 1]  # else sessions keep them
        freed += _bytes(files)
        for file in files:
            file.unlink(missing_ok=True)
        if not any(space.iterdir()):
            space.rmdir()
    said = f"Deleted the KV pages in {folder}, {human_bytes(freed)} freed"
    emit({"dir": str(folder), "freed_bytes": freed}, said, as_json=as_json)


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
