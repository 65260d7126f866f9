"""`mlxinfer suggest`: models that fit this machine, from a small table of the library."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..memory import MODELS_SHARE, human_bytes, parse_bytes
from ._options import Size, json_option
from ._output import emit_json, human_count, table

TABLE = Path(__file__).parent.parent / "assets" / "suggestions.json"
BITS = 4.5  # a parameter of a 4-bit model, scales included
KV_BYTES = 2  # of a number in the KV cache
WIDE = 130  # columns of a terminal that has room for the whole table
TASKS = ("chat", "code", "reasoning", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A model of the table.

    Attributes:
        parameters: all of them.
        active: those that a token is computed with.
        layers: of which the KV cache grows with the context.
        kv_numbers: keys and values of one token in one layer.
        context: tokens, of the model.
    """

    name: str
    source: str
    parameters: float
    active: float
    layers: int
    kv_numbers: int
    context: int
    tasks: list[str]
    weights_bytes: float | None = None

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return int(self.parameters * BITS / 8 if self.weights_bytes is None else self.weights_bytes)

    def bytes_at(self, context: int) -> int:
        """Of the weights and the KV cache of one conversation."""
        return self.bytes + self.layers * self.kv_numbers * KV_BYTES * min(context, self.context)

    def longest_context(self, limit_bytes: int) -> int:
        """The tokens of one conversation for which there is room, up to the model's own."""
        room = (limit_bytes - self.bytes) // (self.layers * self.kv_numbers * KV_BYTES)
        return max(0, min(room, self.context))


def suggestions() -> list[Suggestion]:
    """The models of the table."""
    return [Suggestion(**each) for each in json.loads(TABLE.read_text(encoding="utf-8"))["models"]]


@click.command()
@click.option("--for", "task", type=click.Choice(TASKS), help="What it shall be good for.")
@click.option(
    "--memory",
    type=Size(),
    metavar="SIZE",
    help="Of the machine, such as 32GB.  [default: this one]",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Tokens of a conversation for which there must be room.",
)
@json_option
def command(task: str | None, memory: str | None, context: int, as_json: bool) -> None:
    """Say which models fit this machine.

    The largest come first. Sizes are counted from the cards of the models; nothing is downloaded.
    """
    from ..fit import models_limit_bytes

    given = memory is not None
    limit = int(MODELS_SHARE * parse_bytes(str(memory))) if given else models_limit_bytes()
    asked = [each for each in suggestions() if task is None or task in each.tasks]
    fitting = sorted((s for s in asked if s.bytes_at(context) <= limit), key=lambda s: -s.bytes)
    if as_json:
        emit_json({"limit_bytes": limit, "models": [_as_dict(s, limit) for s in fitting]})
        return
    click.echo(f"{human_bytes(limit)} for models, weights and KV cache together\n", err=True)
    if not fitting:
        raise click.ClickException(
            f"No model of the table fits with {context:,} tokens of context."
        )
    header = ("MODEL", "WEIGHTS", "CONTEXT THAT FITS", "PARAMETERS", "FOR")
    shown = len(header) if shutil.get_terminal_size().columns >= WIDE else 3
    rows = [_row(each, limit)[:shown] for each in fitting]
    click.echo(table(rows, header=header[:shown]))
    click.echo(f"\nmlxinfer pull {fitting[0].name}")
    click.echo(f"mlxinfer chat -m {fitting[0].name}")


def _row(found: Suggestion, limit: int) -> tuple[str, ...]:
    size = human_count(found.parameters).replace(" ", "")
    if found.active < found.parameters:
        size += f" ({human_count(found.active).replace(' ', '')} active)"
    longest = f"{found.longest_context(limit):,} of {found.context:,}"
    return found.name, human_bytes(found.bytes), longest, size, ", ".join(found.tasks)


def _as_dict(found: Suggestion, limit: int) -> dict[str, Any]:
    return {
        "name": found.name,
        "parameters": int(found.parameters),
        "active_parameters": int(found.active),
        "weights_bytes": found.bytes,
        "longest_context": found.longest_context(limit),
        "max_context": found.context,
        "tasks": found.tasks,
        "source": found.source,
        "get": f"mlxinfer pull {found.name}",
    }
