"""`mlxinfer doctor`: is everything here that is needed, and what to do where it is not."""

import sys

import click

from ._checks import CHECKS, FAIL, OK, WARN, Check, examine
from ._options import json_option
from ._output import emit_json, styled

_STYLES = {OK: "32", WARN: "33", FAIL: "31"}


@click.command()
@click.option(
    "--kernels",
    is_flag=True,
    help="Compile and run every Metal kernel beside plain MLX: agreement and speed.",
)
@json_option
def command(kernels: bool, as_json: bool) -> None:
    """Check this machine and this installation. Exits with 1 where something fails."""
    healthy = _kernels(as_json) if kernels else _machine(as_json)
    if not healthy:
        raise click.exceptions.Exit(1)


def _machine(as_json: bool) -> bool:
    checks = []
    for check in CHECKS:
        checks.append(examine(check))
        if not as_json:
            click.echo(_line(checks[-1]))
    healthy = all(check.status != FAIL for check in checks)
    if as_json:
        emit_json({"ok": healthy, "checks": [check.as_dict() for check in checks]})
    return healthy


def _kernels(as_json: bool) -> bool:
    from ..backend import require_mlx

    require_mlx()
    from ._kernels import kernel_report

    report = kernel_report()
    if as_json:
        emit_json(report.as_dict())
    else:
        click.echo(report.as_text())
    return report.ok


def _line(check: Check) -> str:
    label = styled(f"{check.status:4}", _STYLES[check.status], sys.stdout)
    advice = f"\n      -> {check.advice}" if check.advice else ""
    return f"{label}  {check.name}: {check.detail}{advice}"
