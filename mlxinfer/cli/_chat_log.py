"""The stored conversation of a chat in the terminal."""

import os
from typing import Any

from ..errors import HistoryError, InvalidRequestError, MlxinferError
from ..history import (
    Conversation,
    History,
    StoredMessage,
    default_place,
    new_id,
    owner_of_key,
    text_sent,
)
from ._options import API_KEY
from ._output import note


def open_history() -> History:
    """Open the history of this user.

    Raises:
        InvalidRequestError: MLXINFER_HISTORY is `off`.
        HistoryError: it cannot be opened.
    """
    place = default_place()
    if place is None:
        raise InvalidRequestError("MLXINFER_HISTORY is `off`: there is no history.")
    return History(place)


def owner() -> str:
    """The owner of the conversations of this user: of MLXINFER_API_KEY, as at the server."""
    return owner_of_key(os.environ.get(API_KEY))


def open_log(*, continued: str | None, keep: bool) -> "ChatLog | None":
    """Return the log of a new conversation, or of one that goes on.

    Args:
        continued: beginning of a conversation's id, or `last`; None: a new conversation.
        keep: store what is said.

    Raises:
        InvalidRequestError: there is no such conversation.
        HistoryError: the history cannot be opened, where it is to be read.
    """
    if continued is None and default_place() is None:
        return None
    try:
        history = open_history()
    except HistoryError as error:
        if continued is not None:
            raise
        note(f"not kept: {error}")
        return None
    try:
        found = None if continued is None else find(history, continued)
    except InvalidRequestError:
        history.close()
        raise
    return ChatLog(history, owner(), found, keep=keep)


def find(history: History, id: str) -> Conversation:
    """Return the conversation with an id that begins so, or the last changed one.

    Raises:
        InvalidRequestError: there is none, or more than one.
    """
    known = history.conversations(owner(), limit=1 if id == "last" else 1_000_000)
    found = known if id == "last" else [each for each in known if each.id.startswith(id)]
    if not found:
        raise InvalidRequestError(
            f"There is no conversation {id!r}; `mlxinfer history list` shows what there is."
        )
    if len(found) > 1:
        raise InvalidRequestError(f"{len(found)} conversations begin with {id!r}; give more of it.")
    return found[0]


class ChatLog:
    """Stores the messages of one conversation as they are said, until storing fails.

    Args:
        history: where.
        owner: of the conversation.
        conversation: to go on with; None: a new one, made with its first message.
        keep: False: nothing is stored.
    """

    def __init__(
        self, history: History, owner: str, conversation: Conversation | None, *, keep: bool
    ) -> None:
        self._history, self._owner, self._keep = history, owner, keep
        self._conversation = conversation
        self._id, self._branch = new_id(), list[StoredMessage]()
        if conversation is not None:
            self._id = conversation.id
            self._branch = history.branch(owner, conversation.id)

    @property
    def title(self) -> str:
        """Of the conversation that was gone on with."""
        return self._conversation.title if self._conversation is not None else ""

    @property
    def system(self) -> str | None:
        """Its system message."""
        settings = self._conversation.settings if self._conversation is not None else {}
        return settings.get("system") or None

    @property
    def model(self) -> str | None:
        """Its model, if that is on this disk: a server may have called it by another name."""
        from .. import hub

        name = self._conversation.model if self._conversation is not None else ""
        try:
            return name if name and hub.resolve(name, download=False) else None
        except MlxinferError:
            return None

    def messages(self) -> list[dict[str, str]]:
        """Return the messages for a model: questions with their files, and answers."""
        return [
            {"role": message.role, "content": text_sent(message)}
            for message in self._branch
            if message.role in ("user", "assistant")
        ]

    def begin(self) -> None:
        """Go on in a new conversation."""
        self._id, self._branch = new_id(), []

    def add(self, role: str, text: str, thoughts: str, *, model: str, system: str | None) -> None:
        """Store one message after the last one; a failure is said once, and ends the storing."""
        parent = self._branch[-1].id if self._branch else None
        details: dict[str, Any] = {"model": model} if role == "assistant" else {}
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
            except HistoryError as error:
                note(f"no longer kept: {error}")
                self._keep = False
        self._branch.append(message)

    def step_back(self) -> None:
        """Leave the last message out of what follows; the next one makes another branch."""
        if self._branch:
            self._branch.pop()

    def close(self) -> None:
        """Close the history."""
        self._history.close()
