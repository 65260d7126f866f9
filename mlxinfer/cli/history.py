"""Conversations on this disk: `mlxinfer history`, and the log of a chat in the terminal."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import click

from ..errors import (
    ConversationNotFoundError,
    HistoryError,
    InvalidRequestError,
    MlxinferError,
    StorageFullError,
)
from ..history import (
    Conversation,
    History,
    StoredMessage,
    default_place,
    new_id,
    pictures_kept,
    text_sent,
)
from ._options import API_KEY, json_option, yes_option
from ._output import confirm, emit, emit_json, escaped, note, printable, table, when
from ._pictures import stored_pictures

NAMES = {"user": "You", "assistant": "Assistant", "tool": "Tool", "system": "System"}
SHORT_ID = 8  # characters that `list` shows
RUN = "run-"  # ids of conversations of `mlxinfer run` begin so


@click.group()
def command() -> None:
    """Conversations of the page and of `mlxinfer chat`.

    ID is the beginning of a conversation's id, or `last`. If MLXINFER_API_KEY is set, you see the
    conversations of that key.
    """


@command.command(name="list")
@click.option("--limit", default=20, type=click.IntRange(1), help="How many to list, at most.")
@json_option
def list_command(limit: int, as_json: bool) -> None:
    """List conversations, the last changed first."""
    with closing(open_history()) as history:
        conversations = history.conversations(owner(history), limit=limit)
    rows = [
        (c.id[:SHORT_ID], when(c.changed_s), escaped(c.model), escaped(c.title))
        for c in conversations
    ]
    data = {"conversations": [asdict(conversation) for conversation in conversations]}
    emit(data, table(rows, header=("ID", "CHANGED", "MODEL", "TITLE")), as_json=as_json)


@command.command()
@click.argument("id", default="last")
@click.option(
    "--all", "everything", is_flag=True, help="Print all conversations, with all branches."
)
@json_option
def show(id: str, everything: bool, as_json: bool) -> None:
    """Print a conversation, or all of them, as Markdown or JSON."""
    with closing(open_history()) as history:
        if everything:
            branches = [(row, history.messages(owner(history), row.id)) for row in every(history)]
        else:
            one = find(history, id)
            branches = [(one, history.branch(owner(history), one.id))]
    if as_json:
        data = [{**asdict(one), "messages": [*map(asdict, messages)]} for one, messages in branches]
        emit_json(data if everything else data[0])
    else:
        texts = [as_markdown(conversation, messages) for conversation, messages in branches]
        click.echo(printable("\n".join(texts)), nl=False)


@command.command()
@click.argument("words", nargs=-1, required=True)
@json_option
def search(words: tuple[str, ...], as_json: bool) -> None:
    """Print the messages that contain all of the WORDS."""
    with closing(open_history()) as history:
        matches = history.search(owner(history), " ".join(words))
    rows = [
        (m.conversation.id[:SHORT_ID], when(m.created_s), NAMES[m.role], escaped(m.excerpt))
        for m in matches
    ]
    data = {"messages": [asdict(match) for match in matches]}
    emit(data, table(rows, header=("ID", "TIME", "WHO", "TEXT")), as_json=as_json)


@command.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Delete all conversations.")
@yes_option
def rm(ids: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Delete conversations for good."""
    if bool(ids) == everything:
        raise click.UsageError("Give the IDs of conversations, or --all.")

    with closing(open_history()) as history:
        conversations = every(history) if everything else [find(history, id) for id in ids]
        what = f"{len(conversations)} conversations"
        if len(conversations) == 1:
            what = escaped(conversations[0].title)
        confirm(f"Delete {what}?", yes)
        for conversation in {c.id: c for c in conversations}.values():
            history.delete(owner(history), conversation.id)
            note(f"deleted {escaped(conversation.title)}")


def as_markdown(conversation: Conversation, messages: list[StoredMessage]) -> str:
    parts = [f"# {conversation.title or 'Conversation'}"]
    if system := conversation.settings.get("system"):
        parts.append("> " + str(system).replace("\n", "\n> "))
    parts += [f"## {NAMES[message.role]}\n\n{text_sent(message)}" for message in messages]
    return "\n\n".join(parts) + "\n"


# -- the log of a chat ----------------------------------------------------------------------------


def open_history() -> History:
    """Open the history of this user."""
    place = default_place()
    if place is None:
        raise InvalidRequestError("MLXINFER_HISTORY is `off`: there is no history.")
    return History(place)


def owner(history: History) -> str:
    """The owner of the conversations of this user: of MLXINFER_API_KEY, as at the server."""
    return history.owner_of_key(os.environ.get(API_KEY))


def open_log(*, continued: str | None, keep: bool) -> "ChatLog | None":
    """Return the log of a new conversation, or of one that goes on."""
    if continued is None and default_place() is None:
        return None
    try:
        history = open_history()
    except (HistoryError, StorageFullError) as error:
        if continued is not None:
            raise
        note(f"not kept: {error}")
        return None
    try:
        conversation = None if continued is None else find(history, continued)
    except InvalidRequestError:
        history.close()
        raise
    return ChatLog(history, owner(history), conversation, keep=keep)


def open_run_log(continued: str | None, *, keep: bool) -> "ChatLog | None":
    """Return the log of `mlxinfer run`: the conversation that it goes on with, or a new one.

    A new one takes the place of the run before, unless somebody went on with that: scripts may run
    thousands. Raises as `open_log`.
    """
    log = open_log(continued=continued, keep=keep or continued is not None)
    if log is not None and continued is None:
        log.begin(f"{RUN}{new_id()}", instead_of=RUN)
    return log


def every(history: History) -> list[Conversation]:
    return history.conversations(owner(history))


def find(history: History, id: str) -> Conversation:
    """Return the conversation with an id that begins so, or the last changed one."""
    matches = [conversation for conversation in every(history) if conversation.id.startswith(id)]
    if id == "last":
        matches = history.conversations(owner(history), limit=1)
    if not matches:
        raise InvalidRequestError(
            f"There is no conversation {id!r}; `mlxinfer history list` shows what there is."
        )
    if len(matches) > 1:
        raise InvalidRequestError(
            f"{len(matches)} conversations begin with {id!r}; give more of it."
        )
    return matches[0]


def as_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatLog:
    """Stores the messages of one conversation as they are said, until storing fails.

    Args:
        history: where.
        conversation: to go on with; None: a new one, made with its first message.
        keep: False: nothing is stored.

    Attributes:
        title, system: title and system message of the conversation that was gone on with.
    """

    def __init__(
        self, history: History, owner: str, conversation: Conversation | None, *, keep: bool
    ) -> None:
        self._history, self._owner, self._keep = history, owner, keep
        self._id, self._branch = new_id(), list[StoredMessage]()
        self.title, self._model = "", ""
        self.system: str | None = None
        if conversation is not None:
            self._id, self._model = conversation.id, conversation.model
            self.title = conversation.title
            self.system = conversation.settings.get("system") or None
            self._branch = history.branch(owner, conversation.id)

    @property
    def model(self) -> str | None:
        from .. import hub

        try:
            return self._model if self._model and hub.resolve(self._model, download=False) else None
        except MlxinferError:
            return None

    def messages(self, *, sees: bool) -> list[dict[str, Any]]:
        """Return the messages for a model: questions with their files, and answers."""
        messages = []
        for message in self._branch:
            said: dict[str, Any] = {"role": message.role}
            said["content"] = text_sent(message, sees=sees)
            if images := pictures_kept(message) if sees else []:
                said["images"] = images
            if calls := message.details.get("tool_calls"):
                said["tool_calls"] = [as_call(**call) for call in calls]
            if message.role == "tool":
                said["tool_call_id"] = message.details.get("tool_call_id")
            messages.append(said)
        return messages

    def begin(self, id: str | None = None, *, instead_of: str | None = None) -> None:
        """Go on in a new conversation.

        Args:
            id: of the conversation; None: any.
            instead_of: the newest conversation goes, if its id begins so and it has one answer.
        """
        self._id, self._branch = id or new_id(), []
        if instead_of is None or not self._keep:
            return
        for newest in self._history.conversations(self._owner, limit=1):
            single = len(self._history.messages(self._owner, newest.id)) <= 2
            if newest.id.startswith(instead_of) and single:
                with suppress(ConversationNotFoundError):  # another process was faster
                    self._history.delete(self._owner, newest.id)

    def add(
        self,
        role: str,
        text: str,
        thoughts: str = "",
        *,
        model: str,
        system: str | None,
        images: Sequence[str | bytes] = (),
        details: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Store one message after the last one; a failure is said once, and ends the storing."""
        parent = self._branch[-1].id if self._branch else None
        details = {**details, "model": model} if role == "assistant" else dict(details)
        if images:
            details["pictures"] = stored_pictures(images)
        message = StoredMessage(
            id=new_id(), parent=parent, role=role, content=text, reasoning=thoughts, details=details
        )
        if self._keep:
            try:
                self._history.save_message(self._owner, self._id, message)
                if parent is None:
                    settings = {"system": system} if system else {}
                    self._history.save_conversation(
                        self._owner, self._id, model=model, settings=settings
                    )
            except (HistoryError, StorageFullError) as error:
                note(f"no longer kept: {error}")
                self._keep = False
        self._branch.append(message)

    def step_back(self) -> None:
        """Leave the last message out of what follows; the next one makes another branch."""
        if self._branch:
            self._branch.pop()

    def close(self) -> None:
        self._history.close()
