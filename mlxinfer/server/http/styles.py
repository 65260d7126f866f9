"""How errors look in an API: body and stream event of each style. Knows no handlers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import MlxinferError, OverloadedError
from . import sse
from .replies import Body, encode

HIDDEN = "The server failed to answer this request. Its log says why, under the request id."
MAX_LOGGED_CHARS = 60  # of a field: a schema may name its own
MAX_MESSAGE_CHARS = 2000
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


@dataclass(frozen=True, slots=True)
class ErrorStyle:
    """`body` is the JSON of an error answer, `event` a frame that ends a stream."""

    body: Callable[[MlxinferError], bytes]
    event: Callable[[MlxinferError], bytes]


def public(error: Exception) -> MlxinferError:
    """What a client may see of an error: faults of ours are told without details."""
    if isinstance(error, MlxinferError) and error.status != 500:
        return error
    return MlxinferError(HIDDEN)


def logged(error: Exception) -> dict[str, object]:
    """What the log says of an error: its kind and which field; messages may quote a prompt."""
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
    if shown.status in (408, 504):  # to try again would cost as much and end the same way
        reply.headers.append((b"x-should-retry", b"false"))
    return reply


def openai_error(error: MlxinferError) -> dict[str, object]:
    """The body of OpenAI's errors; all four keys are always there."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }


OPENAI = ErrorStyle(
    body=lambda error: encode(openai_error(error)),
    event=lambda error: sse.data(openai_error(error)),
)
