"""`mlxinfer bench`: how fast a model is here; `mlxinfer bench serve`: how a server bears a load."""

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import API_KEY, Option, engine_options, json_option, llm_arguments, model_option

if TYPE_CHECKING:
    from ..bench.report import Report


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """1,8,64 -> [1, 8, 64]."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            counts = [int(part) for part in str(value).split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,8,64.", param, ctx)
        return counts


class Lengths(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """256 -> (256, 256); 100-1000 -> (100, 1000)."""

    name = "N or N-M"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, tuple):
            return value
        low, _, high = str(value).partition("-")
        try:
            bounds = int(low), int(high or low)
        except ValueError:
            bounds = 0, 0
        if not 1 <= bounds[0] <= bounds[1]:
            self.fail(f"{value!r} is no length such as 256, or 100-1000.", param, ctx)
        return bounds


def number(flag: str, default: int | None, help: str, *, least: int = 1) -> Option:
    kind = click.IntRange(min=least)
    return click.option(flag, type=kind, default=default, help=help)


def counts(flag: str, default: str | None, help: str) -> Option:
    return click.option(flag, type=Counts(), default=default, help=help)


def lengths(flag: str, default: str, help: str) -> Option:
    return click.option(flag, type=Lengths(), default=default, help=help)


markdown_option = click.option(
    "--markdown", "as_markdown", is_flag=True, help="Write the tables in Markdown."
)


@click.group(invoke_without_command=True)
@model_option
@counts("--contexts", None, "Prompt lengths in tokens.  [default: 512,2048,8192]")
@counts("--batches", "1,4", "Requests at once.")
@number("--tokens", 128, "Tokens of each answer.", least=2)
@number("--runs", 1, "Number of measurements; the median is shown.")
@click.option(
    "--peer/--skip-peer",
    default=None,
    help="Also measure mlx-lm on the same prompts.  [default: if it is installed]",
)
@click.option(
    "--compare",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare with a report that --json wrote.",
)
@engine_options(  # what was computed before would not be measured
    without=["disk_cache", "disk_cache_dir", "prefix_cache", "max_batch"]
)
@markdown_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    peer: bool | None,
    compare: Path | None,
    as_json: bool,
    as_markdown: bool,
    **options: Any,
) -> None:
    """Measure how fast a model is on this machine.

    Shows prompt tokens and generated tokens per second, time to the first token, and peak memory,
    for several context lengths and numbers of requests at once.
    """
    if ctx.invoked_subcommand is not None:
        return
    arguments = llm_arguments(options)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # mlx-lm imports it
    from importlib.util import find_spec

    from ..bench.speed import read_saved, run
    from ..llm import LLM

    sizes = {name: options[name] for name in ("contexts", "batches", "tokens", "runs")}
    before = None if compare is None else read_saved(compare)
    most = max(64, *options["batches"])
    report = run(
        partial(LLM, model, prefix_cache=False, max_batch=most, **arguments),
        peer=find_spec("mlx_lm") is not None if peer is None else peer,
        before=before,
        **sizes,
    )
    _show(report, as_json, as_markdown)


@command.command()
@click.option("--url", default="http://127.0.0.1:8080/v1", help="Address of the server.")
@click.option(
    "-m", "--model", help="Name of the model at the server.  [default: the first that it lists]"
)
@number("--requests", 64, "Number of requests.")
@number("--concurrency", None, "Requests in flight, at most.  [default: 8; with --rate: all]")
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="R",
    help="Requests a second, at random times (Poisson).  [default: as fast as they are answered]",
)
@lengths(
    "--prompt-tokens", "256", "Length of prompts, about; lengths are drawn evenly from a range."
)
@lengths("--answer-tokens", "128", "Longest answer; lengths are drawn evenly from a range.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, help="Temperature of all requests."
)
@click.option("--seed", type=int, default=0, help="Seed of lengths and times.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    help="Seconds of silence until a request counts as failed.",
)
@markdown_option
@json_option
def serve(as_json: bool, as_markdown: bool, **options: Any) -> None:
    """Put a server under load.

    It may be any server with OpenAI's API. Shows requests and tokens per second, percentiles of the
    time to the first token and between tokens, and errors. MLXINFER_API_KEY is the server's key.
    The exit status is 1 if a request failed.
    """
    from ..bench.load import ServerLoad, run

    report = run(ServerLoad(key=os.environ.get(API_KEY), **options))
    _show(report, as_json, as_markdown)
    if report.data["failed"]:
        raise click.exceptions.Exit(1)


def _show(report: "Report", as_json: bool, as_markdown: bool) -> None:
    from ..bench.report import describe_machine, show

    report.machine = describe_machine(shlex.join(["mlxinfer", *sys.argv[1:]]))
    show(report, as_json=as_json, as_markdown=as_markdown)
