"""`mlxinfer batch`: the requests of a file, answered into another."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..configfile import ConfigFile
from ..errors import InvalidRequestError, MlxinferError
from ..memory import MODELS_SHARE
from ..progress import progress_bar
from ._configuration import requested_models
from ._options import Size, engine_options_without
from ._output import counted, note
from .serve import registry

if TYPE_CHECKING:
    from ..server.batches.lines import ResultFiles

SHOWN_PROBLEMS = 5
_FILE = click.Path(dir_okay=False, path_type=Path)
_INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("input_path", metavar="IN.jsonl", type=_INPUT)
@click.argument("output_path", metavar="OUT.jsonl", type=_FILE)
@click.option(
    "--errors",
    "errors_path",
    type=_FILE,
    metavar="FILE",
    help="Where requests that failed go.  [default: OUT.errors.jsonl]",
)
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    default=("demo",),
    show_default=True,
    metavar="MODEL",
    help="Bundled model, folder, or org/name; repeatable. NAME=MODEL answers requests for NAME; "
    "a single model answers all.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="An adapter of the first model, asked for as MODEL:NAME; or MODEL:NAME=PATH; repeatable.",
)
@click.option(
    "--max-memory",
    type=Size(),
    metavar="SIZE",
    help=f"Weights and KV caches of all loaded models.  [default: {MODELS_SHARE} of the machine's]",
)
@click.option(
    "--tool-format",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="How the models write tool calls, where their chat templates do not show it.",
)
@engine_options_without("max_memory")
def command(
    input_path: Path,
    output_path: Path,
    errors_path: Path | None,
    models: tuple[str, ...],
    **options: Any,
) -> None:
    """Answer the requests of a file into another.

    Lines are those of OpenAI's batches: {"custom_id": ..., "method": "POST", "url":
    "/v1/chat/completions", "body": ...}; url may be /v1/completions, /v1/responses,
    /v1/embeddings, /v1/rerank or /v1/score, too. Run again after an end of any kind it goes on
    where it was; delete the errors first to try those again.
    """
    from ..server.app import ENDPOINTS
    from ..server.batches.lines import ResultFiles, check_rows, rows_of
    from ..server.batches.run import BatchRun, batch_endpoints
    from ..server.calls.service import Service
    from ..server.settings import ServerConfig

    if not input_path.is_file():
        raise click.UsageError(f"{input_path} is no file; it is read twice, so write it to one.")
    endpoints = batch_endpoints(ENDPOINTS)
    total, problems = check_rows(input_path, endpoints, most=None)
    if problems:
        shown = [f"line {p.line}: {p.message}" for p in problems[:SHOWN_PROBLEMS]]
        raise InvalidRequestError(f"{input_path}: " + "\n".join(shown))
    requested = requested_models(models, ConfigFile(), by_default=False)
    default = requested[0].name if len(requested) == 1 else None
    given = {**options, "ttl": None, "default_model": default, "aliases": ()}
    errors_path = errors_path or output_path.with_suffix(".errors.jsonl")
    results = ResultFiles(output_path, errors_path)
    service = Service(registry(requested, given), ServerConfig())
    try:
        with progress_bar("batch", unit="answers") as show:
            run = BatchRun(
                service, endpoints, results, on_done=lambda: show(len(results.done), total)
            )
            asyncio.run(_run(service, default, lambda: run.run(rows_of(input_path))))
    except KeyboardInterrupt:
        note(f"interrupted; {len(results.done)} of {total} are done, the same command goes on")
        raise
    finally:
        results.close()
        service.close()
    _summarise(results, output_path, errors_path)


async def _run(service: Any, model: str | None, work: Callable[[], Any]) -> None:
    """Load the model, if there is but one: what is wrong with it is said at once."""
    if model is not None:
        await service.models.load(model)
    await work()


def _summarise(results: "ResultFiles", output_path: Path, errors_path: Path) -> None:
    answered = len(results.done) - results.num_failed
    note(f"{counted(answered, 'answer')} in {output_path}")
    if results.num_failed:
        raise MlxinferError(
            f"{counted(results.num_failed, 'request')} failed; {errors_path} says why, by line."
        )
