"""Replies of handlers: a JSON body, a stream of events, or an error in the style of an API."""

import errno
import math
import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Send

from ...errors import MlxinferError, OverloadedError
from ..errors import DiskFullError
from . import sse

HIDDEN = "The server failed to answer this request. Its log says why, under the request id."
MAX_LOGGED_CHARS = 60  # of a field's name, which a schema may choose
MAX_MESSAGE_CHARS = 2000
NO_STORE = (b"cache-control", b"no-store")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_encoder = msgspec.json.Encoder()

Headers = list[tuple[bytes, bytes]]


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
    media_type: bytes = b"text/event-stream; charset=utf-8"
    headers: Headers = field(default_factory=list)


Reply = Body | Events


def encode(value: Any) -> bytes:
    """JSON of structs and plain data."""
    return _encoder.encode(value)


def json_body(value: Any, status: int = 200) -> Body:
    """A struct or plain data as a JSON answer."""
    return Body(encode(value), status)


async def send_body(send: Send, reply: Body) -> None:
    """Send a complete answer."""
    headers = [
        (b"content-type", reply.media_type),
        (b"content-length", str(len(reply.content)).encode()),
        NO_STORE,
        *reply.headers,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.content, "more_body": False})


@dataclass(frozen=True, slots=True)
class ErrorStyle:
    """How an API writes errors: `body` gives an error's JSON, `event` a stream's last frame."""

    body: Callable[[MlxinferError], bytes]
    event: Callable[[MlxinferError], bytes]


def public(error: Exception) -> MlxinferError:
    """The error that a client is shown: details of the server's own faults are hidden."""
    if isinstance(error, MlxinferError) and error.status != 500:
        return error
    if _is_of_full_disk(error):
        return DiskFullError("The server's disk is full; nothing was stored. Make room there.")
    return MlxinferError(HIDDEN)


def _is_of_full_disk(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def logged(error: Exception) -> dict[str, object]:
    """The log's fields of an error: its class and parameter. Messages may quote a prompt."""
    param = error.param if isinstance(error, MlxinferError) else None
    return {"error": type(error).__name__, "param": param and param[:MAX_LOGGED_CHARS]}


def error_reply(error: Exception, style: ErrorStyle) -> Body:
    """The answer to a request that failed before its reply began."""
    shown = public(error)
    reply = Body(style.body(shown), shown.status)
    if isinstance(shown, OverloadedError):
        reply.headers.append((b"retry-after", str(max(1, math.ceil(shown.retry_after_s))).encode()))
    if shown.status == 401:
        reply.headers.append((b"www-authenticate", b"Bearer"))
    if shown.status in (408, 504, 507):  # to try again would cost as much and end the same way
        reply.headers.append((b"x-should-retry", b"false"))
    return reply


def clipped_message(error: MlxinferError) -> str:
    """The message of an error, at most MAX_MESSAGE_CHARS of it."""
    message = str(error)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"


def openai_error(error: MlxinferError) -> dict[str, object]:
    """The body of OpenAI's errors; all four keys are always there."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": clipped_message(error),
            "type": _TYPES.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }


OPENAI = ErrorStyle(
    body=lambda error: encode(openai_error(error)),
    event=lambda error: sse.data(openai_error(error)),
)
