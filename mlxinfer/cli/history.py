"""`mlxinfer history`: the conversations of the page and of `mlxinfer chat`."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar

import click

from ..history import Conversation, History, StoredMessage, text_sent
from ._chat_log import find, open_history, owner
from ._options import json_option
from ._output import counted, emit_json, escaped, note, printable, table

NAMES = {"user": "You", "assistant": "Assistant", "tool": "Tool", "system": "System"}
SHORT_ID = 8  # characters that `list` shows
T = TypeVar("T")


@click.group()
def command() -> None:
    """Conversations of the page and of `mlxinfer chat`.

    ID is the beginning of a conversation's id, or `last`. With MLXINFER_API_KEY set they are those
    of that key, as at the server.
    """


@command.command(name="list")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1), help="At most.")
@json_option
def list_command(limit: int, as_json: bool) -> None:
    """List conversations, the last changed first."""
    found = _with_history(lambda history: history.conversations(owner(), limit=limit))
    if as_json:
        emit_json({"conversations": [asdict(each) for each in found]})
        return
    rows = [
        (each.id[:SHORT_ID], _time(each.changed_s), escaped(each.model), escaped(each.title))
        for each in found
    ]
    click.echo(table(rows, header=("ID", "CHANGED", "MODEL", "TITLE")))


@command.command()
@click.argument("id", default="last")
@click.option("--all", "everything", is_flag=True, help="All conversations, with all branches.")
@json_option
def show(id: str, everything: bool, as_json: bool) -> None:
    """Print a conversation, or all of them, as Markdown or JSON."""
    found = _with_history(_everything if everything else lambda history: [_shown(history, id)])
    if as_json:
        data = [_as_dict(conversation, messages) for conversation, messages in found]
        emit_json(data if everything else data[0])
    else:
        texts = [as_markdown(conversation, messages) for conversation, messages in found]
        click.echo(printable("\n".join(texts)), nl=False)


@command.command()
@click.argument("words", nargs=-1, required=True)
@json_option
def search(words: tuple[str, ...], as_json: bool) -> None:
    """Print the messages that hold all of the WORDS."""
    found = _with_history(lambda history: history.search(owner(), " ".join(words)))
    if as_json:
        emit_json({"messages": [asdict(each) for each in found]})
        return
    rows = [
        (
            each.conversation.id[:SHORT_ID],
            _time(each.created_s),
            NAMES[each.role],
            escaped(each.excerpt),
        )
        for each in found
    ]
    click.echo(table(rows, header=("ID", "TIME", "WHO", "TEXT")))


@command.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All conversations.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(ids: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Delete conversations for good."""
    if bool(ids) == everything:
        raise click.UsageError("Give the IDs of conversations, or --all.")

    def chosen(history: History) -> list[Conversation]:
        if everything:
            return history.conversations(owner(), limit=1_000_000)
        return [find(history, id) for id in ids]

    found = _with_history(chosen)
    if everything and not yes:
        click.confirm(f"Delete {counted(len(found), 'conversation')}?", abort=True, err=True)

    def delete(history: History) -> None:
        for conversation in {each.id: each for each in found}.values():
            history.delete(owner(), conversation.id)
            note(f"deleted {escaped(conversation.title)}")

    _with_history(delete)


def as_markdown(conversation: Conversation, messages: list[StoredMessage]) -> str:
    """A conversation for people."""
    parts = [f"# {conversation.title or 'Conversation'}"]
    if system := conversation.settings.get("system"):
        parts.append("> " + str(system).replace("\n", "\n> "))
    parts += [f"## {NAMES[message.role]}\n\n{text_sent(message)}" for message in messages]
    return "\n\n".join(parts) + "\n"


def _as_dict(conversation: Conversation, messages: list[StoredMessage]) -> dict[str, Any]:
    return {**asdict(conversation), "messages": [asdict(message) for message in messages]}


def _shown(history: History, id: str) -> tuple[Conversation, list[StoredMessage]]:
    conversation = find(history, id)
    return conversation, history.branch(owner(), conversation.id)


def _everything(history: History) -> list[tuple[Conversation, list[StoredMessage]]]:
    found = history.conversations(owner(), limit=1_000_000)
    return [(each, history.messages(owner(), each.id)) for each in found]


def _with_history(read: Callable[[History], T]) -> T:
    with closing(open_history()) as history:
        return read(history)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
