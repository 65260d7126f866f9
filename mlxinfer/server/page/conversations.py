"""/history: conversations and their messages, of the key that asks. Bodies are never logged."""

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import InvalidRequestError
from ...history import Conversation, History, StoredMessage, owner_of
from ..call import Call
from ..http import Plain, RequestBody
from ..routes import Route

MAX_LISTED = 200
MAX_QUERY_CHARS = 400


class ConversationFields(RequestBody, kw_only=True):
    """Changes of a conversation, which is made if it is not there; null: no change."""

    id: str
    title: str | None = None
    model: str | None = None
    settings: dict[str, Any] | None = None
    head: str | None = None  # the last message of the branch that is shown


class MessageFields(RequestBody, kw_only=True):
    """A message of a conversation, new or in place of the one with this id."""

    conversation: str
    id: str
    role: str
    content: str
    parent: str | None = None  # the message before it; null: it is the first
    reasoning: str = ""
    details: dict[str, Any] = msgspec.field(default_factory=dict)
    created_s: Annotated[float, Meta(ge=0)] = 0.0


class ConversationRoutes:
    """The handlers of /history over one history file."""

    def __init__(self, history: History) -> None:
        self._history = history

    async def list(self, call: Call) -> Plain:
        """Stored conversations, the last changed first; `limit` and `before` page through them."""
        limit = int(_number(call.query, "limit", MAX_LISTED) or 50)
        before_s = _number(call.query, "before", None)
        found = await call.in_worker(
            self._history.conversations, _owner(call), limit=limit + 1, before_s=before_s
        )
        return {"data": found[:limit], "more": len(found) > limit}

    async def show(self, call: Call) -> Plain:
        """A conversation with the messages of all its branches."""
        owner, id = _owner(call), call.path_params["id"]
        found = await call.in_worker(self._history.conversation, owner, id)
        return {
            **asdict(found),
            "messages": await call.in_worker(self._history.messages, owner, id),
        }

    async def save(self, call: Call, body: ConversationFields) -> Conversation:
        """Make a conversation, or change its title, model, settings or branch."""
        fields = {name: getattr(body, name) for name in ("title", "model", "settings", "head")}
        return await call.in_worker(
            self._history.save_conversation, _owner(call), body.id, **fields
        )

    async def save_message(self, call: Call, body: MessageFields) -> Conversation:
        """Store a message; a first question gives the conversation its title."""
        owner = _owner(call)
        message = StoredMessage(
            **{name: getattr(body, name) for name in StoredMessage.__dataclass_fields__}
        )
        await call.in_worker(self._history.save_message, owner, body.conversation, message)
        return await call.in_worker(self._history.conversation, owner, body.conversation)

    async def delete(self, call: Call) -> Plain:
        """Delete a conversation."""
        id = call.path_params["id"]
        await call.in_worker(self._history.delete, _owner(call), id)
        return {"id": id, "deleted": True}

    async def search(self, call: Call) -> Plain:
        """Messages with all words of the query `q`."""
        words = call.query.get("q", "")[:MAX_QUERY_CHARS]
        matches = await call.in_worker(self._history.search, _owner(call), words)
        found = [
            {**asdict(each), "conversation": each.conversation.id, "title": each.conversation.title}
            for each in matches
        ]
        return {"data": found}

    def routes(self) -> tuple[Route, ...]:
        """The routes of /history."""
        return (
            Route("GET", "/history/conversations", self.list),
            Route("POST", "/history/conversations", self.save),
            Route("GET", "/history/conversations/{id}", self.show),
            Route("DELETE", "/history/conversations/{id}", self.delete),
            Route("POST", "/history/messages", self.save_message),
            Route("GET", "/history/search", self.search),
        )


def _number(query: dict[str, str], name: str, most: float | None) -> float | None:
    if name not in query:
        return None
    try:
        value = float(query[name])
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InvalidRequestError(f"{name} is a positive number.", param=name)
    return value if most is None else min(value, most)


def _owner(call: Call) -> str:
    """The owner of the request's key; the guard has checked it and noted its name."""
    digests = dict(call.service.config.keys.digests)
    return owner_of(None if call.key is None else digests[call.key])
