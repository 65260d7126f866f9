"""/history: conversations and their messages, of the key that asks. Bodies are never logged."""

from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta

from ...errors import InvalidRequestError
from ...history import Conversation, History, Match, StoredMessage, owner_of
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Reply, json_body

MAX_LISTED = 200
MAX_QUERY_CHARS = 400


class ConversationFields(msgspec.Struct, kw_only=True):
    """What to change of a conversation, which is made if it is not there; null: nothing."""

    id: str
    title: str | None = None
    model: str | None = None
    settings: dict[str, Any] | None = None
    head: str | None = None  # the last message of the branch that is shown


class MessageFields(msgspec.Struct, kw_only=True):
    """A message of a conversation, new or in place of the one with this id."""

    conversation: str
    id: str
    role: str
    content: str
    parent: str | None = None  # the message before it; null: it is the first
    reasoning: str = ""
    details: dict[str, Any] = {}
    created_s: Annotated[float, Meta(ge=0)] = 0.0


class ConversationCard(msgspec.Struct, kw_only=True):
    """A conversation, with its messages where one was asked for."""

    id: str
    title: str
    model: str
    settings: dict[str, Any]
    head: str | None
    created_s: float
    changed_s: float
    messages: list[dict[str, Any]] | None = None  # of all branches


class ConversationList(msgspec.Struct, kw_only=True):
    """Conversations, the last changed first."""

    data: list[ConversationCard]
    more: bool  # there are older ones: ask with before=changed_s of the last


class FoundMessage(msgspec.Struct, kw_only=True):
    """A message that a search found."""

    conversation: str
    title: str
    message: str
    role: str
    excerpt: str
    created_s: float


class FoundMessages(msgspec.Struct, kw_only=True):
    """What a search found, the newest first."""

    data: list[FoundMessage]


class Deleted(msgspec.Struct, kw_only=True):
    """A conversation is gone."""

    id: str
    deleted: bool = True


class ConversationRoutes:
    """The handlers of /history over one history file."""

    def __init__(self, history: History) -> None:
        self._history = history

    async def list(self, call: Call, _: None) -> Reply:
        """The newest conversations; `limit` and `before` (a changed_s) page through them."""
        query = query_of(call)
        limit = int(_number(query, "limit", MAX_LISTED) or 50)
        before_s = _number(query, "before", None)
        found = await call.in_worker(
            self._history.conversations, _owner(call), limit=limit + 1, before_s=before_s
        )
        cards = [_card(conversation) for conversation in found[:limit]]
        return json_body(ConversationList(data=cards, more=len(found) > limit))

    async def show(self, call: Call, _: None) -> Reply:
        """One conversation with the messages of all its branches."""
        owner, id = _owner(call), call.path_params["id"]
        conversation = await call.in_worker(self._history.conversation, owner, id)
        messages = await call.in_worker(self._history.messages, owner, id)
        card = _card(conversation)
        card.messages = [asdict(message) for message in messages]
        return json_body(card)

    async def save(self, call: Call, body: ConversationFields) -> Reply:
        """Make or change a conversation."""
        fields = {name: getattr(body, name) for name in ("title", "model", "settings", "head")}
        saved = await call.in_worker(
            self._history.save_conversation, _owner(call), body.id, **fields
        )
        return json_body(_card(saved))

    async def save_message(self, call: Call, body: MessageFields) -> Reply:
        """Store a message; a first question gives the conversation its title."""
        owner = _owner(call)
        message = StoredMessage(
            **{name: getattr(body, name) for name in StoredMessage.__dataclass_fields__}
        )
        await call.in_worker(self._history.save_message, owner, body.conversation, message)
        saved = await call.in_worker(self._history.conversation, owner, body.conversation)
        return json_body(_card(saved))

    async def delete(self, call: Call, _: None) -> Reply:
        """Delete a conversation."""
        id = call.path_params["id"]
        await call.in_worker(self._history.delete, _owner(call), id)
        return json_body(Deleted(id=id))

    async def search(self, call: Call, _: None) -> Reply:
        """Messages with all words of `q`."""
        words = query_of(call).get("q", "")[:MAX_QUERY_CHARS]
        found = await call.in_worker(self._history.search, _owner(call), words)
        return json_body(FoundMessages(data=[_found(match) for match in found]))

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Of /history."""
        return (
            Endpoint(
                method="GET",
                path="/history/conversations",
                handler=self.list,
                summary="Stored conversations, the last changed first.",
                answer=ConversationList,
            ),
            Endpoint(
                method="POST",
                path="/history/conversations",
                handler=self.save,
                summary="Make a conversation, or change its title, model, settings or branch.",
                body=ConversationFields,
                answer=ConversationCard,
            ),
            Endpoint(
                method="GET",
                path="/history/conversations/{id}",
                handler=self.show,
                summary="A conversation with all its messages.",
                answer=ConversationCard,
            ),
            Endpoint(
                method="DELETE",
                path="/history/conversations/{id}",
                handler=self.delete,
                summary="Delete a conversation.",
                answer=Deleted,
            ),
            *self._of_messages(),
        )

    def _of_messages(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                method="POST",
                path="/history/messages",
                handler=self.save_message,
                summary="Store a message of a conversation.",
                body=MessageFields,
                answer=ConversationCard,
            ),
            Endpoint(
                method="GET",
                path="/history/search",
                handler=self.search,
                summary="Messages with all words of the query q.",
                answer=FoundMessages,
            ),
        )


def query_of(call: Call) -> dict[str, str]:
    """The query of a request's path; the last of several values counts."""
    text = call.scope["query_string"].decode("ascii", "replace")
    return {name: values[-1] for name, values in parse_qs(text).items()}


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
    name = call.log.get("key")
    return owner_of(None if name is None else digests[name])


def _card(conversation: Conversation) -> ConversationCard:
    return ConversationCard(**asdict(conversation))


def _found(match: Match) -> FoundMessage:
    return FoundMessage(
        conversation=match.conversation.id,
        title=match.conversation.title,
        message=match.message,
        role=match.role,
        excerpt=match.excerpt,
        created_s=match.created_s,
    )
