"""Routes of the page beside its files: history, models, PDFs, settings."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ... import __version__
from ...errors import InvalidRequestError, shown
from ...history import Conversation, History, StoredMessage
from ...mcp_tools import McpTools
from ..call import Call
from ..errors import HttpError
from ..http import Plain, RequestBody, Route
from ..pdf import can_read_pdf
from ..service import ServerState
from ..workers import Workers
from .answers import AnswerRoutes, Owners
from .library import RECIPES, Library, LibraryRoutes

MAX_LISTED = 200
MAX_QUERY_CHARS = 400


class Setting(msgspec.Struct, kw_only=True):
    """An effective setting of the server, and where it comes from."""

    name: str
    value: Any
    origin: str


class PdfFile(RequestBody, kw_only=True):
    """A file and its content in base64."""

    name: str
    data: str


# -- /history: of the key that asks; bodies are never logged -----------------------------------


class ConversationFields(RequestBody, kw_only=True):
    """Changes of a conversation, which is made if it is not there; null: no change."""

    id: str
    title: str | None = None
    model: str | None = None
    settings: dict[str, Any] | None = None
    head: str | None = None  # the last message of the branch that is shown
    pinned: bool | None = None


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

    def __init__(self, history: History, owners: Owners, answers: AnswerRoutes) -> None:
        self._history, self._owners, self._answers = history, owners, answers

    async def list(self, call: Call) -> Plain:
        """Stored conversations, the last changed first; `limit` and `before` page through them.

        All that are pinned come first, on the first page. `answering`: the message that grows now,
        or null.
        """
        limit = int(_number(call.query, "limit", MAX_LISTED) or 50)
        before_s = _number(call.query, "before", None)
        owner = await self._owners.of(call)
        list_some, pinned = self._history.conversations, list[Conversation]()
        if before_s is None:
            pinned = await call.in_worker(list_some, owner, pinned=True)
        conversations = await call.in_worker(
            list_some, owner, limit=limit + 1, before_s=before_s, pinned=False
        )
        grows = self._answers.running(owner)
        listed = [
            {**asdict(conversation), "answering": grows.get(conversation.id)}
            for conversation in (*pinned, *conversations[:limit])
        ]
        return {"data": listed, "more": len(conversations) > limit}

    async def show(self, call: Call) -> Plain:
        """A conversation with the messages of all its branches."""
        owner, id = await self._owners.of(call), call.path_params["id"]
        answering = self._answers.running(owner).get(id)  # before its messages are read
        conversation = await call.in_worker(self._history.conversation, owner, id)
        return {
            **asdict(conversation),
            "messages": await call.in_worker(self._history.messages, owner, id),
            "answering": answering,
        }

    async def save(self, call: Call, body: ConversationFields) -> Conversation:
        """Make a conversation, or change its title, model, settings, branch or pin."""
        fields = {
            name: value for name, value in msgspec.structs.asdict(body).items() if name != "id"
        }
        return await call.in_worker(
            self._history.save_conversation, await self._owners.of(call), body.id, **fields
        )

    async def save_message(self, call: Call, body: MessageFields) -> Conversation:
        """Store a message; a first question gives the conversation its title."""
        owner = await self._owners.of(call)
        message = StoredMessage(
            **{name: getattr(body, name) for name in StoredMessage.__dataclass_fields__}
        )
        await call.in_worker(self._history.save_message, owner, body.conversation, message)
        return await call.in_worker(self._history.conversation, owner, body.conversation)

    async def delete(self, call: Call) -> Plain:
        """Delete a conversation; its answers end."""
        owner, id = await self._owners.of(call), call.path_params["id"]
        await self._answers.end_all(owner, id)
        await call.in_worker(self._history.delete, owner, id)
        return {"id": id, "deleted": True}

    async def search(self, call: Call) -> Plain:
        """Messages with all words of the query `q`."""
        words = call.query.get("q", "")[:MAX_QUERY_CHARS]
        matches = await call.in_worker(self._history.search, await self._owners.of(call), words)
        hits = [
            {
                **asdict(match),
                "conversation": match.conversation.id,
                "title": match.conversation.title,
            }
            for match in matches
        ]
        return {"data": hits}

    def routes(self) -> tuple[Route, ...]:
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
        raise InvalidRequestError.of(name, "is a positive number.")
    return value if most is None else min(value, most)


# -- /page/tools: of the MCP servers of the config file ------------------------------------------


class ToolCallFields(RequestBody, kw_only=True):
    """A call of a tool; `arguments` is the text of a JSON object.

    `consent`: a person has seen this call and agreed to it.
    """

    name: str
    arguments: str = "{}"
    consent: bool = False


class ToolRoutes:
    """The handlers of /page/tools. Only the page calls them: no API of the server uses tools."""

    def __init__(self, tools: McpTools) -> None:
        self._tools = tools
        self._workers = Workers(4)  # a call may take minutes, and texts of requests are not to wait

    async def list(self, call: Call) -> Plain:
        """The tools in OpenAI's form, and the names of those that are called without asking."""
        names = [tool["function"]["name"] for tool in self._tools.schemas]
        allowed = [name for name in names if self._tools.allows(name)]
        failures = {**self._tools.failures, **self._tools.left_out}
        return {"data": self._tools.schemas, "allowed": allowed, "failures": failures}

    async def call(self, call: Call, body: ToolCallFields) -> Plain:
        """The text that a tool gives."""
        if not (body.consent or self._tools.allows(body.name)):
            raise HttpError(
                "consent_required",
                f"{shown(body.name)} is not among the tools that run without asking; show the call "
                "to a person, and send consent: true where they agree.",
                param="consent",
            )
        return {"text": await self._workers.run(self._tools.call, body.name, body.arguments)}

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/page/tools", self.list, "admin"),
            Route("POST", "/page/tools", self.call, "admin"),
        )

    def close(self) -> None:
        self._tools.close()
        self._workers.close()


# -- all of them --------------------------------------------------------------------------------


class PageRoutes:
    """The routes of one server's page.

    Args:
        history: where conversations are kept; None: nowhere.
        library: models of this disk and of the hub; None: neither.
        tools: of MCP servers; None: there are none.
    """

    def __init__(
        self,
        history: History | None = None,
        library: Library | None = None,
        settings: Sequence[Setting] = (),
        tools: McpTools | None = None,
    ) -> None:
        self._history, self._owners = history, Owners(history)
        self._answers = AnswerRoutes(self._owners, history)
        self._library = None if library is None else LibraryRoutes(library)
        self._tools = None if tools is None else ToolRoutes(tools)
        self._settings = list(settings)
        self._pdf = can_read_pdf()

    async def features(self, call: Call) -> dict[str, Any]:
        """The parts of the page that this server has."""
        is_admin = call.key is None or call.key.is_admin
        return {
            "version": __version__,
            "machine": "Mac" if sys.platform == "darwin" else "machine",
            "history": self._history is not None,
            "hub": self._library is not None and is_admin,
            "tools": self._tools is not None and is_admin,
            "pdf": self._pdf,
            "max_body_bytes": call.service.config.max_body_bytes,
            "admin": is_admin,  # the key may see and do what is under /admin and /hub
            "recipes": RECIPES,
        }

    async def settings(self, call: Call) -> dict[str, list[Setting]]:
        """The effective settings with their origin; keys are not shown."""
        return {"data": self._settings}

    async def read_pdf(self, call: Call, body: PdfFile) -> dict[str, str]:
        try:
            (text,) = await call.pdf_texts({body.name[:200]: body.data})
        except InvalidRequestError as error:
            error.param = "data"  # the message names the file
            raise
        return {"name": body.name, "text": text}

    def routes(self) -> tuple[Route, ...]:
        routes: tuple[Route, ...] = (
            Route("GET", "/page/features", self.features),
            Route("GET", "/admin/settings", self.settings, "admin"),
            *self._answers.routes(),
        )
        if self._history is not None:
            routes += ConversationRoutes(self._history, self._owners, self._answers).routes()
        if self._library is not None:
            routes += self._library.routes()
        if self._tools is not None:
            routes += self._tools.routes()
        return (*routes, Route("POST", "/page/pdf", self.read_pdf)) if self._pdf else routes

    def restore(self, service: ServerState) -> None:
        """Serve the models that were added on the page before."""
        if self._library is not None:
            self._library.restore(service)

    def close(self) -> None:
        """End jobs, servers of tools and threads, and close the history."""
        if self._tools is not None:
            self._tools.close()
        if self._library is not None:
            self._library.close()
        if self._history is not None:
            self._history.close()
