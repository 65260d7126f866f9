"""`mlxinfer bench`: ratios beside mlx-lm, measured in one run on this machine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import json_option
from ._output import emit_json

if TYPE_CHECKING:
    from ..bench.report import Report

skip_peer = click.option("--skip-peer", is_flag=True, help="Measure mlxinfer alone.")
markdown_option = click.option(
    "--markdown", "as_markdown", is_flag=True, help="Tables in Markdown, for a README."
)


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """1,8,64 -> [1, 8, 64]."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Whole numbers from 1 up."""
        try:
            counts = [int(part) for part in str(value).split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,8,64.", param, ctx)
        return counts


@click.group()
def command() -> None:
    """Measure mlxinfer beside mlx-lm.

    Same machine, same weights, same run.

    Needs mlx-lm (pip install "mlxinfer[bench]") unless --skip-peer is given.
    """


@command.command()
@click.option(
    "--requests",
    type=Counts(),
    default="1,8,64,256",
    show_default=True,
    help="Requests at once; several, with commas.",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Blocks of steps; the median counts.",
)
@skip_peer
@json_option
def host(requests: list[int], blocks: int, skip_peer: bool, as_json: bool) -> None:
    """CPU time of the main thread for one decode step."""
    blas = _prepare()
    from ..bench.host import run

    _show(run(sizes=requests, blocks=blocks, peer=not skip_peer), blas, as_json)


@command.command()
@click.option(
    "--long",
    type=click.IntRange(min=64),
    default=2048,
    show_default=True,
    help="Tokens of the long prompt.",
)
@click.option("--small", is_flag=True, help="A model of seconds instead of minutes.")
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Scenarios of each side; the median counts.",
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=16),
    default=256,
    show_default=True,
    help="Prompt tokens a step, at most.",
)
@click.option("--cpu-time", is_flag=True, help="CPU seconds, for a machine that others use.")
@skip_peer
@json_option
def latency(skip_peer: bool, as_json: bool, **options: Any) -> None:
    """First tokens and gaps beside a long prompt.

    First token of short requests behind it; the longest gap of a stream that runs already.
    """
    blas = _prepare()
    from ..bench.latency import run

    _show(run(**options, peer=not skip_peer), blas, as_json)


@command.command()
@click.option(
    "-m",
    "--model",
    default="demo",
    show_default=True,
    metavar="MODEL",
    help="Bundled model, folder, or org/name.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Processes of each; the median counts.",
)
@skip_peer
@json_option
def start(model: str, runs: int, skip_peer: bool, as_json: bool) -> None:
    """Whole processes, from launch to the first token."""
    from ..bench.start import run

    _show(run(model=model, runs=runs, peer=not skip_peer), None, as_json)


@command.command()
@click.option("--small", is_flag=True, help="Models and counts of seconds instead of minutes.")
@click.option("--cpu-time", is_flag=True, help="CPU seconds, for a machine that others use.")
@skip_peer
@markdown_option
@json_option
def prefix(skip_peer: bool, as_json: bool, as_markdown: bool, **options: Any) -> None:
    """Prompts that begin as others did.

    Tokens computed, first token, KV held.
    """
    blas = _prepare()
    from ..bench.prefix import run

    _show(run(**options, peer=not skip_peer), blas, as_json, as_markdown)


@command.command()
@click.option(
    "-m",
    "--model",
    default="demo",
    show_default=True,
    metavar="MODEL",
    help="Bundled model, folder, or org/name.",
)
@click.option(
    "--long",
    type=click.IntRange(min=64, max=32_000),
    default=16_384,
    show_default=True,
    help="Tokens of the longest context.",
)
@click.option("--small", is_flag=True, help="Models and counts of seconds instead of minutes.")
@skip_peer
@markdown_option
@json_option
def kv(skip_peer: bool, as_json: bool, as_markdown: bool, **options: Any) -> None:
    """The quantised KV cache: quality, speed, peak memory."""
    blas = _prepare()
    from ..bench.kv import run

    _show(run(**options, peer=not skip_peer), blas, as_json, as_markdown)


@command.command()
@click.option(
    "--context",
    type=click.IntRange(min=512),
    default=16_384,
    show_default=True,
    help="Tokens of the context.",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    default=36,
    show_default=True,
    help="Layers of the model.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    help="Of weights and activations.",
)
@markdown_option
@json_option
def peak(as_json: bool, as_markdown: bool, **options: Any) -> None:
    """Peak memory of one long context in each KV format. Without mlx-lm."""
    blas = _prepare()
    from ..bench.peak import run

    _show(run(**options), blas, as_json, as_markdown)


@command.command()
@click.option("--small", is_flag=True, help="Models and counts of seconds instead of minutes.")
@skip_peer
@markdown_option
@json_option
def memory(skip_peer: bool, as_json: bool, as_markdown: bool, **options: Any) -> None:
    """KV cache bytes copied, wasted and moved.

    Copied by steps, wasted by padding, moved when a request comes or goes.
    """
    blas = _prepare()
    from ..bench.memory import run

    _show(run(**options, peer=not skip_peer), blas, as_json, as_markdown)


@command.command()
@click.option(
    "--head-dims",
    type=Counts(),
    default="64,128,256",
    show_default=True,
    help="Sizes of a head; several, with commas.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=8),
    default=500,
    show_default=True,
    help="Tokens of the context.",
)
@markdown_option
@json_option
def kernels(as_json: bool, as_markdown: bool, **options: Any) -> None:
    """Bytes that attention kernels move, beside MLX's own.

    Counted on the CPU, in a checkout.
    """
    from ..bench.kernels import run

    _show(run(**options), None, as_json, as_markdown)


@command.command()
@skip_peer
@markdown_option
@json_option
def dispatches(skip_peer: bool, as_json: bool, as_markdown: bool) -> None:
    """Operations that a GPU is handed for one token.

    Counted in the traced graph.
    """
    from ..bench.dispatches import run

    _show(run(peer=not skip_peer), None, as_json, as_markdown)


@command.command()
@click.option("--model", type=click.Path(path_type=Path), help="A folder of unquantised weights.")
@click.option("--synthetic", metavar="SIZE", help="Time and memory of random weights, say 3GB.")
@click.option("--plot", type=click.Path(path_type=Path), help="An SVG of size against divergence.")
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With --synthetic: of each converter; the quickest counts.",
)
@click.option("--small", is_flag=True, help="Few recipes on few tokens.")
@skip_peer
@markdown_option
@json_option
def convert(skip_peer: bool, as_json: bool, as_markdown: bool, **options: Any) -> None:
    """Conversion: size and quality, or time and memory."""
    blas = _prepare()
    from ..bench.convert import run

    _show(run(**options, peer=not skip_peer), blas, as_json, as_markdown)


@command.command()
@click.option("--small", is_flag=True, help="A model and counts of seconds instead of minutes.")
@skip_peer
@markdown_option
@json_option
def serve(skip_peer: bool, as_json: bool, as_markdown: bool, **options: Any) -> None:
    """Servers over HTTP, as clients see them.

    First tokens, gaps and throughput.
    """
    blas = _prepare()
    from ..bench.serve import run

    _show(run(**options, peer=not skip_peer), blas, as_json, as_markdown)


@command.command()
@click.option("--small", is_flag=True, help="A model and a vocabulary of seconds, not minutes.")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Rounds of masks.",
)
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    default=9,
    show_default=True,
    help="Blocks of steps; the median counts.",
)
@markdown_option
@json_option
def grammar(as_json: bool, as_markdown: bool, **options: Any) -> None:
    """Answers under a grammar, and what they cost.

    Compiling, masks, and what they add to a step. Without mlx-lm.
    """
    blas = _prepare()
    from ..bench.grammar import run

    _show(run(**options), blas, as_json, as_markdown)


def _prepare() -> str | None:
    """A fast BLAS for both sides, before anything imports MLX; and no word from others."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from ..bench.blas import preload_openblas

    return preload_openblas()


def _show(report: "Report", blas: str | None, as_json: bool, as_markdown: bool = False) -> None:
    from ..bench.report import describe_machine

    report.machine = describe_machine(blas)
    if as_json:
        emit_json(report.as_dict())
        return
    if as_markdown:
        from ..bench.markdown import as_text

        click.echo(as_text(report))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for name, fact in report.machine.items():
        console.print(f"[dim]{name:9}[/dim]{fact}", markup=True, soft_wrap=True)
    for found in report.tables:
        table = Table()
        for index, column in enumerate(found.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in found.rows:
            table.add_row(*row)
        console.print(f"\n{found.title}", table, sep="\n", markup=False)
        if found.note:
            console.print(found.note, style="dim", markup=False)
