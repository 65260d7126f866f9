"""`mlxinfer ps`: the models of a running server."""

from typing import Any

import click

from ..memory import human_bytes
from ._options import json_option
from ._output import emit_json, table
from ._remote import ask, url_option

HEADER = ("NAME", "STATE", "WEIGHTS", "KV CACHE", "RUNNING", "WAITING", "UNLOADS IN")


@click.command()
@url_option
@json_option
def command(url: str | None, as_json: bool) -> None:
    """List the models of a running server."""
    reply = ask(url, "/admin/models")
    used = kv_used(ask(url, "/admin/state"))
    for model in reply["models"]:
        model["kv_used_bytes"] = used.get(model["name"])
    if as_json:
        emit_json(reply)
        return
    click.echo(table([row_of(model) for model in reply["models"]], header=HEADER))
    taken, limit = reply["memory_reserved_bytes"], reply["memory_limit_bytes"]
    click.echo(f"{human_bytes(taken)} of {human_bytes(limit)} for models", err=True)


def kv_used(dashboard: dict[str, Any]) -> dict[str, int]:
    """Bytes of KV cache in use, kept prefixes included, of the models that are loaded."""
    return {
        model["state"]["name"]: engine["kv_used_bytes"] + engine["kv_cached_bytes"]
        for model in dashboard["models"]
        if (engine := model["engine"]) is not None
    }


def row_of(model: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    return [
        model["name"],
        state_of(model),
        human_bytes(model["weights_bytes"]),
        _of_limit(model["kv_used_bytes"], model["kv_bytes"]),
        str(model["requests_running"]),
        str(model["requests_waiting"]),
        "pinned" if model["pinned"] else duration(model["ttl_left_s"]),
    ]


def _of_limit(used: int | None, limit: int) -> str:
    return (
        f"- of {human_bytes(limit)}"
        if used is None
        else f"{human_bytes(used)} of {human_bytes(limit)}"
    )


def state_of(model: dict[str, Any]) -> str:
    """Return the model's state; after a failed load also when it is tried again."""
    if not model["failure"] or model["state"] != "unloaded":
        return str(model["state"])
    left_s = model["retry_left_s"]
    return f"failed, again in {duration(left_s)}" if left_s else "failed"


def duration(seconds: float | None) -> str:
    """1800 -> '30m 0s'; None -> '-'."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{whole}s"
