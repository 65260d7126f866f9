"""`mlxinfer why`: how much of a prompt a running server reused, and why no more."""

from typing import Any
from urllib.parse import quote

import click

from ._options import json_option
from ._output import emit_json, escaped, table, when
from .running import ask, url_option

HEADER = ("TIME", "ID", "MODEL", "PROMPT", "REUSED", "WHY NO MORE")


@click.command()
@click.argument("id", required=False)
@url_option
@json_option
def command(id: str | None, url: str | None, as_json: bool) -> None:
    """Show why prompts were computed again, of the last requests to a running server.

    ID is that of an answer (chatcmpl-…) or its x-request-id. Without it the last requests are
    listed. You see the requests of the key in MLXINFER_API_KEY.
    """
    reply = ask(url, "/v1/reuse" if id is None else f"/v1/reuse/{quote(id, safe='')}")
    if as_json:
        emit_json(reply)
    elif id is not None:
        click.echo("\n".join(lines_of(reply)))
    else:
        click.echo(table([row_of(record) for record in reply["data"]], header=HEADER))


def row_of(request: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    return [
        when(request["created_s"]),
        request["id"],
        escaped(request["model"]),
        str(request["prompt_tokens"]),
        str(request["cached_tokens"]),
        f"{request['cause']} at {request['position']}",
    ]


def lines_of(request: dict[str, Any]) -> list[str]:
    tiers = [f"{count} from {tier}" for tier, count in request["tiers"].items() if count]
    reused = f"{request['cached_tokens']} of {request['prompt_tokens']} prompt tokens were reused"
    lines = [f"{reused}{': ' if tiers else ''}{', '.join(tiers)}."]
    lines.append(f"{request['cause']} at token {request['position']}: {request['message']}")
    if "earlier_id" in request:
        lines.append(f"nearest earlier request: {request['earlier_id']}")
    if "differs_at" in request:
        lines.append(f"from token {request['differs_at']} on:")
        lines.append(f"  now      {escaped(request['text'])}")
        lines.append(f"  earlier  {escaped(request['earlier_text'])}")
    return lines
