"""Routes, bodies of requests within limits, and replies: JSON, event streams, errors of an API.

No frame of a stream carries an `id:`. Silence in a stream is broken by an event of its API.
"""

import asyncio
import inspect
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import msgspec.structs
from msgspec import Meta

from ..errors import (
    InvalidRequestError,
    MlxinferError,
    OverloadedError,
    StorageFullError,
    UnsupportedFieldError,
    clipped,
)
from .config import ServerConfig
from .errors import HttpError

T = TypeVar("T")
Plain = dict[str, Any]  # a JSON object
Scope = MutableMapping[str, Any]  # ASGI's: of one request
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# -- bodies of requests -------------------------------------------------------------------------

MAX_PRIORITY = 1000
MAX_CONTAINERS = 1_000_000  # brackets and braces, in strings too
_HALF_A_PAIR = re.compile(  # of an escaped surrogate pair: a lone first half, or a lone second one
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_AT = re.compile(r" - at (`key` in |`value` in )?`\$\.?(.*)`$")


class ClientGoneError(Exception):
    """The client disconnected before its request was complete."""


async def read_body(scope: Scope, receive: Receive, config: ServerConfig) -> bytes:
    """Read the complete body.

    Raises:
        HttpError: the body is longer than the limit, as declared or as received; or it is not
            complete in time.
        ClientGoneError: the client disconnected.
    """
    timeout_s = config.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            parts = body_parts(scope, receive, config.max_body_bytes)
            return b"".join([part async for part in parts])
    except TimeoutError:
        raise HttpError(
            "request_timeout", f"The body did not arrive within {timeout_s:g} seconds."
        ) from None


async def body_parts(scope: Scope, receive: Receive, max_bytes: int) -> AsyncIterator[bytes]:
    """The parts of a body as they arrive; raises as `read_body`, and waits for ever."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size, more = size + len(part), message.get("more_body", False)
        if size > max_bytes:
            raise _too_large(max_bytes)
        yield part


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(
        "request_too_large", f"The body is longer than {max_bytes} bytes, which is the limit."
    )


class RequestBody(msgspec.Struct, kw_only=True):
    """The body of a request. Unknown fields are skipped: clients send many of their own.

    Attributes:
        refused: fields that would change the answer and are not supported: name -> values that
            ask for what happens anyway.
        aliases: other servers' names of fields: alias -> name.
        may_be_empty: no body stands for `{}`.
    """

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    may_be_empty: ClassVar[bool] = False

    def resolve(self) -> None:
        """Raise InvalidRequestError for fields that do not go together. Called once."""

    @property
    def order(self) -> int:
        """Priority among the requests of a key: lower ones come first, see `fair.Tenant.at`."""
        return 0


class SharingBody(RequestBody, kw_only=True):
    """The body of a request that works for its key: it has a place among the key's requests."""

    # of vLLM: of this key's requests, lower ones begin first; above 0: in the background
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    @property
    def order(self) -> int:
        return self.priority or 0


B = TypeVar("B", bound=RequestBody)


def decode(body: bytes, kind: type[B], place: str = "") -> B:
    """Return the body as a struct, checked.

    Args:
        place: the field that the JSON is the value of, for errors; "": the JSON is a whole body.

    Raises:
        InvalidRequestError: the body is not JSON in UTF-8, holds too many lists and objects, or a
            field has the wrong type; `param` is then the path of that field.
        UnsupportedFieldError: a refused field asks for something.
    """
    if kind.may_be_empty and not body:
        body = b"{}"
    _check_containers(body)
    try:
        body.decode()  # msgspec does not look into strings of fields that it skips
        value = msgspec.json.decode(body, type=kind)
        if kind.refused or kind.aliases:
            _take_tables(value, msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), place) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(_not_json(body, str(error))) from None
    value.resolve()
    return value


def _take_tables(value: RequestBody, given: Mapping[str, msgspec.Raw]) -> None:
    for name, neutral in value.refused.items():
        if name in given:
            refuse(name, _decoded(given[name], Any, name), neutral)
    for alias, name in value.aliases.items():
        if alias in given:
            table = _decoded(given[alias], _kind_of(type(value), name), alias)
            setattr(value, name, same_field({name: getattr(value, name), alias: table}))


@cache
def _kind_of(struct: type, name: str) -> Any:
    return next(f.type for f in msgspec.structs.fields(struct) if f.name == name)


def _decoded(value: msgspec.Raw, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), name) from None


def refuse(name: str, value: Any, neutral: tuple[Any, ...] = ()) -> None:
    """Raise UnsupportedFieldError unless `value` is absent or neutral: it changes nothing."""
    if value is None or any(type(value) is type(n) and value == n for n in neutral):
        return
    usable = f" (only {neutral[0]!r} is)" if neutral else ""
    raise UnsupportedFieldError.of(name, f"is not supported here{usable}.")


def same_field(given: Mapping[str, T | None]) -> T | None:
    """The value of a field that has several names; None: it is absent."""
    stated = [(name, value) for name, value in given.items() if value is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise InvalidRequestError.of(
                name, f"and {stated[0][0]} are one field, and differ; send one."
            )
    return stated[0][1] if stated else None


def _not_json(body: bytes, message: str) -> str:
    """A message that names an empty body and half a character, which the parser does not name."""
    if not body.strip():
        return "The body is empty; expected a JSON object."
    half = _HALF_A_PAIR.search(body)
    if half:
        return (
            f"The body holds half of a surrogate pair, {half.group().decode()}: a text was cut "
            "in the middle of a character. Send valid Unicode."
        )
    return f"The body is not valid JSON: {message}"


def _check_containers(body: bytes) -> None:
    """Refuse millions of lists: they take 25 times their text, and block all other threads."""
    count = body.count(b"[") + body.count(b"{")
    if count > MAX_CONTAINERS:
        raise InvalidRequestError(
            f"The body holds {count} lists and objects, or texts with as many brackets; "
            f"at most {MAX_CONTAINERS} are accepted. Send less at once."
        )


def wrong_field(message: str, place: str = "") -> InvalidRequestError:
    """The error of msgspec's `Expected int, got str - at $.a[0].b`, with the path as `param`."""
    match = _AT.search(message)
    missing = re.match(r"Object missing required field `(\w+)`", message)
    parts = [place, match.group(2) if match else "", missing.group(1) if missing else ""]
    path = ".".join(part for part in parts if part)
    if missing:
        return InvalidRequestError.of(path, "is missing, and is required.")
    text = _AT.sub("", message)
    return InvalidRequestError(f"{path}: {text}." if path else f"{text}.", param=path or None)


# -- replies ------------------------------------------------------------------------------------

NO_STORE = (b"cache-control", b"no-store")
EVENTS = b"text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class Body:
    """A complete answer."""

    content: bytes
    status: int = 200
    media_type: bytes = b"application/json"
    headers: Headers = field(default_factory=list)


@dataclass(slots=True)
class Events:
    """A stream of events; an item of `frames` holds one frame or several."""

    frames: AsyncIterator[bytes]
    media_type: bytes = EVENTS
    headers: Headers = field(default_factory=list)


@dataclass(slots=True)
class File:
    """A file in pieces, none of which is empty."""

    pieces: AsyncIterator[bytes]
    num_bytes: int
    media_type: bytes = b"application/octet-stream"


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def data(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """The frame of a named event, as Anthropic's messages and OpenAI's responses send it."""
    return b"event: " + event.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


def page_of(
    items: Sequence[Plain],
    query: Mapping[str, str],
    most: int,
    *,
    after: str = "after",
    before: str = "before",
) -> Plain:
    """A page of a list; its ids are cursors of the pages beside it.

    Args:
        items: with ids.
        query: `limit`, and the id of an item that the page comes behind or ends before.
        most: the highest limit.
        after, before: names of the cursors.

    Raises:
        InvalidRequestError: an unknown item, both cursors, or an invalid limit.
    """
    text, ids = query.get("limit", "20"), [item.get("id") for item in items]
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise InvalidRequestError.of("limit", f"is {text[:20]!r}; expected 1 to {most}.")
    cursors = [name for name in (after, before) if name in query]
    for name in cursors:
        if query[name] not in ids:
            raise InvalidRequestError(f"{name}: {query[name][:100]!r} is not listed.", param=name)
    if len(cursors) == 2:
        raise InvalidRequestError(f"Send {after} or {before}, not both.", param=before)
    first = ids.index(query[after]) + 1 if after in query else 0
    rest = items[first : ids.index(query[before]) if before in query else None]
    data = rest[-limit:] if before in query else rest[:limit]
    return {
        "data": data,
        "has_more": len(rest) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


# -- errors -------------------------------------------------------------------------------------

HIDDEN = "The server failed to answer this request. Its log says why, under the request id."
MAX_LOGGED_CHARS = 60  # of a field's name, which a schema may choose
MAX_MESSAGE_CHARS = 2000
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How an API writes errors: `body` gives an error's JSON, `event` a stream's last frame.

    `id_headers`: headers in which its clients look for the request id, beside x-request-id.
    """

    body: Callable[[MlxinferError], bytes]
    event: Callable[[MlxinferError], bytes]
    id_headers: tuple[bytes, ...] = ()


def public(error: Exception) -> MlxinferError:
    """The error that a client is shown. Details of the server's own faults are hidden."""
    if isinstance(error, MlxinferError) and error.status != 500:
        return error
    return StorageFullError.cause(error) or MlxinferError(HIDDEN)


def logged(error: Exception) -> dict[str, object]:
    """The log's fields of an error: its class, code and parameter. Messages may quote a prompt."""
    if not isinstance(error, MlxinferError):
        return {"error": type(error).__name__}
    param = error.param and error.param[:MAX_LOGGED_CHARS]
    return {"error": type(error).__name__, "code": error.code, "param": param}


def error_reply(shown: MlxinferError, form: ErrorForm) -> Body:
    reply = Body(form.body(shown), shown.status)
    if isinstance(shown, OverloadedError):
        reply.headers.append((b"retry-after", str(max(1, math.ceil(shown.retry_after_s))).encode()))
    if shown.status == 401:
        reply.headers.append((b"www-authenticate", b"Bearer"))
    if shown.status in (408, 504, 507):  # to try again would cost as much and end the same way
        reply.headers.append((b"x-should-retry", b"false"))
    return reply


def clipped_message(error: MlxinferError) -> str:
    return clipped(str(error), MAX_MESSAGE_CHARS)


def openai_error(error: MlxinferError) -> dict[str, Any]:
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": clipped_message(error),
            "type": _TYPES.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }


OPENAI = ErrorForm(
    body=lambda error: encode(openai_error(error)), event=lambda error: data(openai_error(error))
)


# -- routes: the one place that says which access a request needs ---------------------------------

Access = Literal["anyone", "key", "admin"]


@dataclass(frozen=True)
class Route:
    """One method of one path.

    Attributes:
        method, path: "POST", "/v1/chat/completions"; `{name}` in the path is a parameter, found in
            `Call.path_params`; `{name:path}` may hold slashes.
        handler: gets the Call and, if it has a second argument, the body as that argument's type.
            It returns plain data, which is sent as JSON, or a Body, or Events. The first line of
            its docstring describes it.
        takes_file: the body is a file of any length, which the handler gets as its second argument.
        access: "anyone": no key is needed, so the path shows nothing private. "key": a key of the
            server, where it has keys. "admin": a key that administers the server; for models,
            adapters and everything that other keys see.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    access: Access = "key"
    takes_file: bool = False

    @cached_property
    def body(self) -> type | None:
        """The struct of the request's body; None: no body is read."""
        parameters = list(inspect.signature(self.handler).parameters.values())
        return parameters[1].annotation if len(parameters) > 1 else None
