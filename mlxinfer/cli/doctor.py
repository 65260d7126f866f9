"""`mlxinfer doctor`: is everything here that is needed, and what to do where it is not."""

import sys

import click

from ._checks import CHECKS, FAIL, OK, WARN, Check, examine
from ._options import json_option
from ._output import emit_json, styled

_STYLES = {OK: "32", WARN: "33", FAIL: "31"}


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Check this machine and this installation. Exits with 1 where something fails."""
    checks = []
    for check in CHECKS:
        checks.append(examine(check))
        if not as_json:
            click.echo(_line(checks[-1]))
    healthy = all(check.status != FAIL for check in checks)
    if as_json:
        emit_json({"ok": healthy, "checks": [check.as_dict() for check in checks]})
    if not healthy:
        raise click.exceptions.Exit(1)


def _line(check: Check) -> str:
    label = styled(f"{check.status:4}", _STYLES[check.status], sys.stdout)
    advice = f"\n      -> {check.advice}" if check.advice else ""
    return f"{label}  {check.name}: {check.detail}{advice}"
