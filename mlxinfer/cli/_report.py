"""Commands that print a report of `mlxinfer.bench`. Knows tables, not what is measured."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ._options import Option, apply_options, json_option
from ._output import emit_json

if TYPE_CHECKING:
    from ..bench.report import Report

_markdown_option = click.option(
    "--markdown", "as_markdown", is_flag=True, help="Tables in Markdown, for a README."
)
Measure = Callable[..., "Report"]


def reports(
    group: click.Group, *options: Option, fast_blas: bool = True
) -> Callable[[Measure], click.Command]:
    """Make a function a command of `group` that prints what it returns, in one of three forms.

    Args:
        group: of commands.
        options: which it takes.
        fast_blas: both sides get a fast BLAS where there is one, before anything imports MLX.
    """

    def command(measure: Measure) -> click.Command:
        def print_report(as_json: bool, as_markdown: bool, **given: Any) -> None:
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no word from mlx-lm's
            blas = _preload_blas() if fast_blas else None
            if "skip_peer" in given:
                given["peer"] = not given.pop("skip_peer")
            _print(measure(**given), blas, as_json, as_markdown)

        taking = apply_options((*options, _markdown_option, json_option), print_report)
        return group.command(measure.__name__, help=measure.__doc__)(taking)

    return command


def _preload_blas() -> str | None:
    from ..bench.blas import preload_openblas

    return preload_openblas()


def _print(report: "Report", blas: str | None, as_json: bool, as_markdown: bool) -> None:
    from ..bench.report import describe_machine

    report.machine = describe_machine(blas)
    if as_json:
        emit_json(report.as_dict())
    elif as_markdown:
        from ..bench.markdown import as_text

        click.echo(as_text(report))
    else:
        _print_tables(report)


def _print_tables(report: "Report") -> None:
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
