"""Who may ask, and what every answer carries: the outermost ASGI layer. Knows headers, no bodies.

Everything is refused unless a rule lets it in. Paths are compared as uvicorn decoded them
(`scope["path"]`), never as a URL put together from the Host header.
"""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import InvalidRequestError, OverloadedError
from ..errors import (
    HeadersTooLargeError,
    MediaTypeError,
    MethodError,
    NoSuchPathError,
)
from ..keys import Headers
from ..settings import ServerConfig, is_loopback
from .body import ClientGoneError
from .origins import HostRules
from .protocol import CONNECTIONS
from .replies import send_body
from .styles import OPENAI, ErrorStyle, error_reply, logged
from .targets import read_target

METRICS = "/metrics"
POLLED = frozenset({"/health", "/ready", METRICS})  # again and again: the log shows what is odd
CLIENT_GONE = 499  # in the log, where nobody was left to get a status
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
access_log = logging.getLogger("mlxinfer.access")
log = logging.getLogger("mlxinfer.server")


class Listed(Protocol):
    """What the guard wants to know of an endpoint."""

    @property
    def path(self) -> str:
        """As in a router: `{name}` is a parameter."""

    @property
    def style(self) -> ErrorStyle:
        """How its errors look."""

    @property
    def needs_key(self) -> bool:
        """False: anybody is answered."""

    @property
    def if_header(self) -> bytes | None:
        """Of two with one path this one answers requests that carry the header."""


class Guard:
    """Checks a request, runs the app, and answers for whatever it raises.

    Args:
        app: what is guarded.
        config: keys and limits.
        endpoints: which paths need no key, and how errors of each look.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, endpoints: Sequence[Listed] = ()
    ) -> None:
        self._app = app
        self._config = config
        self._public = frozenset(e.path for e in endpoints if not e.needs_key and "{" not in e.path)
        self._styles = [(e.path.partition("{")[0], e.if_header, e.style) for e in endpoints]
        self._hosts = HostRules(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the access log gets one line of it."""
        if scope["type"] != "http":
            return
        read_target(scope)
        exchange = Exchange(scope, send, self._style_of(scope))
        try:
            _check_framing(exchange, scope, self._config.max_connections)
            if not await self._hosts.answer_preflight(scope, exchange.send):
                self._check(scope)
                exchange.headers += self._hosts.response_headers(scope)
                await self._app(scope, receive, exchange.send)
        except ClientGoneError:
            exchange.status = CLIENT_GONE
        except Exception as error:  # the fault boundary of a request: it fails, the server goes on
            await exchange.fail(error)
        finally:
            exchange.write_log()

    def _style_of(self, scope: Scope) -> ErrorStyle:
        """Of the endpoint whose path is the longest beginning of this one, and its header here."""
        path, headers = scope["path"], {name for name, _ in scope["headers"]}
        fitting = [
            (len(start), header is not None, style)
            for start, header, style in self._styles
            if path.startswith(start) and (header is None or header in headers)
        ]
        return max(fitting, key=lambda found: found[:2])[2] if fitting else OPENAI

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        _check_sizes(scope, self._config)
        self._hosts.check(scope)
        if not self._is_open(scope):
            key = self._config.keys.name_of(headers)
            if key is not None:
                scope["mlxinfer.log"]["key"] = key
        if scope["method"] == "POST":
            _check_json(headers)

    def _is_open(self, scope: Scope) -> bool:
        """Whether this request needs no key."""
        if scope["path"] == METRICS and self._config.open_metrics:
            client = scope.get("client")
            return client is not None and is_loopback(client[0])
        return scope["path"] in self._public


class Exchange:
    """One request on the wire: what is added to its answer and written to the log."""

    def __init__(self, scope: Scope, send: Send, style: ErrorStyle) -> None:
        self._scope = scope
        self._style = style
        self._send = send
        self._began_s = time.monotonic()
        self.id = _request_id(scope)
        self.status: int | None = None
        self.headers = [(b"x-request-id", self.id.encode())]
        scope["mlxinfer.id"] = self.id
        scope["mlxinfer.log"] = {}

    async def send(self, message: Message) -> None:
        """Pass a message on; the first one gets the headers that every answer carries."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with an error, if an answer has not begun."""
        error = _as_ours(error)
        self._scope["mlxinfer.log"].update(logged(error))
        reply = error_reply(error, self._style)
        if reply.status == 500:
            log.error("request failed", exc_info=error, extra={"request_id": self.id})
        if self.status is None:
            await send_body(self.send, reply)

    def write_log(self) -> None:
        """One line; never anything of the prompt or the answer."""
        scope = self._scope
        client = scope.get("client")
        polled = scope["path"] in POLLED and self.status == 200
        access_log.log(
            logging.DEBUG if polled else logging.INFO,
            "request",
            extra={
                "request_id": self.id,
                "method": scope["method"],
                "path": scope["path"],
                "status": self.status if self.status is not None else CLIENT_GONE,
                "duration_ms": round(1000 * (time.monotonic() - self._began_s), 1),
                "client": client[0] if client else None,
                **scope["mlxinfer.log"],
            },
        )


def _as_ours(error: Exception) -> Exception:
    if not isinstance(error, HTTPException):
        return error
    if error.status_code == 405:
        return MethodError("This path is there, but not for this method.")
    return NoSuchPathError("Nothing is served at this path; /docs lists what is.")


def _check_framing(exchange: Exchange, scope: Scope, max_connections: int) -> None:
    """Refuse, and hang up, where the connection itself is not to go on."""
    names = {name for name, _ in scope["headers"]}
    ambiguous = names >= {b"content-length", b"transfer-encoding"}
    num_open = len(scope["state"][CONNECTIONS])
    if ambiguous or num_open > max_connections:
        exchange.headers.append((b"connection", b"close"))
    if num_open > max_connections:
        raise OverloadedError(f"More than {max_connections} connections are open.")
    if ambiguous:  # somebody in between may have found another end of it (RFC 9112, 6.1)
        raise InvalidRequestError("content-length and transfer-encoding exclude each other.")


def _check_sizes(scope: Scope, config: ServerConfig) -> None:
    """Refuse what h11 takes where it comes whole: it bounds what is incomplete only."""
    headers = scope["headers"]
    if len(headers) > config.max_headers:
        raise HeadersTooLargeError(
            f"{len(headers)} headers came; at most {config.max_headers} are read. Send fewer."
        )
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + len(b": \r\n") for name, value in headers)
    if size > config.max_header_bytes:
        raise HeadersTooLargeError(
            f"Path and headers have {size} bytes; at most {config.max_header_bytes} are read. "
            "Send shorter ones."
        )


def _check_json(headers: Headers) -> None:
    kinds = [v.partition(b";")[0].strip().lower() for k, v in headers if k == b"content-type"]
    if kinds != [b"application/json"]:
        raise MediaTypeError("The content-type of a request with a body is application/json.")
    encodings = {value.strip().lower() for key, value in headers if key == b"content-encoding"}
    if not encodings <= {b"identity"}:
        raise MediaTypeError("Bodies are read without content-encoding.")


def _request_id(scope: Scope) -> str:
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _ID.fullmatch(given) else secrets.token_hex(12)
