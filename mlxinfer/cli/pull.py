"""`mlxinfer pull`: download a model, or bring it up to date."""

from pathlib import Path

import click

from .. import hub
from ..errors import InsufficientMemoryError, MlxinferError
from ..memory import human_bytes
from ._model import download_bar
from ._options import complete_models, json_option
from ._output import counted, emit_json, note


@click.command()
@click.argument("name", shell_complete=complete_models)
@click.option("--dry-run", is_flag=True, help="Say what would be downloaded, and whether it fits.")
@json_option
def command(name: str, dry_run: bool, as_json: bool) -> None:
    """Download a model from the Hugging Face hub.

    NAME is org/name or org/name@revision.
    An interrupted download goes on where it stopped.
    """
    if dry_run:
        _plan(name, as_json=as_json)
        return
    with download_bar(name) as progress:
        folder = hub.pull(name, progress=progress)
    if as_json:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        emit_json({"name": name, "path": str(folder), "size_bytes": size})
    else:
        click.echo(f"{name} is in {folder}")
        _say_whether_it_fits(name, folder)


def _say_whether_it_fits(name: str, folder: Path) -> None:
    """A model may also be here to be converted: one that is too large is a note."""
    from ..fit import held_bytes, require_fit

    try:
        require_fit(name, folder, weights_bytes=held_bytes(folder))
    except InsufficientMemoryError as error:
        note(str(error))
    except MlxinferError:
        return  # it may not run here; `show` says why


def _plan(name: str, *, as_json: bool) -> None:
    from ..fit import models_limit_bytes
    from ._inspect import fit_of_repository

    plan = hub.plan_pull(name)
    repo = plan.listing.repo
    fit = fit_of_repository(name, models_limit_bytes())
    if as_json:
        emit_json(
            {
                "name": str(repo),
                "commit": plan.listing.commit,
                "total_bytes": plan.total_bytes,
                "missing_bytes": plan.missing_bytes,
                "free_bytes": plan.free_bytes,
                "fit": fit.as_dict(),
                "files": [{"path": f.path, "size_bytes": f.size} for f in plan.files],
            }
        )
    else:
        click.echo(
            f"{repo}: {human_bytes(plan.total_bytes)} in {counted(len(plan.files), 'file')}, "
            f"{human_bytes(plan.missing_bytes)} to download, "
            f"{human_bytes(plan.free_bytes)} free\n{fit.text}"
        )
    plan.check_room()
