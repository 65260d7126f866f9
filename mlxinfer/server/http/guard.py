"""The outermost ASGI layer: which requests are served, and what every answer carries.

Everything is refused unless a rule allows it. Paths are compared as uvicorn decoded them
(`scope["path"]`), never as a URL put together from the Host header.
"""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import InvalidRequestError, OverloadedError
from ..errors import (
    ForbiddenError,
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
from .replies import OPENAI, ErrorStyle, error_reply, logged, send_body

METRICS = "/metrics"
POLLED = frozenset(
    {"/health", "/ready", "/admin/state", "/hub/jobs", METRICS}
)  # logged at level info only on errors
ADMIN_PATHS = ("/admin/", "/hub/")  # models, downloads, what all keys run
JSON = b"application/json"
BROWSERS = frozenset((b"origin", b"sec-fetch-site", b"referer"))  # headers that they send
CLIENT_GONE = 499  # the log's status of a request after its client disconnected
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
access_log = logging.getLogger("mlxinfer.access")
log = logging.getLogger("mlxinfer.server")


class Listed(Protocol):
    """The attributes of an endpoint that the guard reads."""

    @property
    def path(self) -> str:
        """Of a router: `{name}` is a parameter."""

    @property
    def style(self) -> ErrorStyle:
        """Of its errors."""

    @property
    def needs_key(self) -> bool:
        """False: it is served without a key."""

    @property
    def method(self) -> str:
        """Of its requests."""

    @property
    def if_header(self) -> bytes | None:
        """Of two endpoints with one path this one serves requests that carry the header."""


class Guard:
    """Checks a request, runs the app, and turns its exceptions into error replies.

    Args:
        app: the ASGI app behind it.
        config: keys and limits.
        endpoints: say which paths need no key, and the error style of each.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, endpoints: Sequence[Listed] = ()
    ) -> None:
        self._app = app
        self._config = config
        self._public = frozenset(e.path for e in endpoints if not e.needs_key and "{" not in e.path)
        self._exact = frozenset(e.path for e in endpoints if "{" not in e.path)
        self._begins = tuple(e.path.partition("{")[0] for e in endpoints if "{" in e.path)
        starts = [(e.path.partition("{")[0], e) for e in endpoints]
        folders = [(start.rpartition("/")[0] + "/", e) for start, e in starts]
        self._styles = [(start, e.if_header, e.style) for start, e in starts + folders]
        self._hosts = HostRules(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and write its line of the access log."""
        if scope["type"] != "http":
            return
        _split_target(scope)
        scope["path"] = self._canonical(scope["path"])
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

    def _canonical(self, path: str) -> str:
        """The path under /v1 that a client means: with one /v1, and without a trailing slash.

        Clients differ in whether their base URL ends with /v1. Other paths stay as they are.
        """
        if self._serves(path) and not path.endswith("/"):
            return path
        plain = path.rstrip("/")
        for meant in (plain.removeprefix("/v1"), plain, f"/v1{plain}"):
            if meant.startswith("/v1/") and self._serves(meant):
                return meant
        return path

    def _serves(self, path: str) -> bool:
        return path in self._exact or path.startswith(self._begins)

    def _style_of(self, scope: Scope) -> ErrorStyle:
        """The style of the endpoint with the longest matching path, one with a header first.

        Where nothing is served it is that of the first endpoint in the same folder.
        """
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
            if scope["path"].startswith(ADMIN_PATHS) and not self._config.keys.administers(key):
                raise ForbiddenError(
                    f"The key {key} may not administer this server; `admin = true` in its table of "
                    "the keys file lets it."
                )
        if scope["method"] == "POST":
            _check_media_type(headers)

    def _is_open(self, scope: Scope) -> bool:
        """Whether this request is served without a key."""
        if scope["path"] == METRICS and self._config.open_metrics:
            client = scope.get("client")
            return client is not None and is_loopback(client[0])
        return scope["path"] in self._public


class Exchange:
    """One request and its answer: headers that every answer carries, and the access log."""

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
        """Pass a message on, the first one with the headers that every answer carries."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with an error, unless the answer has begun."""
        error = _server_error(error)
        self._scope["mlxinfer.log"].update(logged(error))
        reply = error_reply(error, self._style)
        if reply.status == 500:
            log.error("request failed", exc_info=error, extra={"request_id": self.id})
        if self.status is None:
            await send_body(self.send, reply)

    def write_log(self) -> None:
        """Write one line, with nothing of the prompt or the answer."""
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


def _server_error(error: Exception) -> Exception:
    if not isinstance(error, HTTPException):
        return error
    if error.status_code == 405:
        return MethodError("This path is there, but not for this method.")
    return NoSuchPathError("Nothing is served at this path; /docs lists what is.")


def _check_framing(exchange: Exchange, scope: Scope, max_connections: int) -> None:
    """Refuse requests after which the connection has to be closed."""
    names = {name for name, _ in scope["headers"]}
    ambiguous = names >= {b"content-length", b"transfer-encoding"}
    num_open = len(scope["state"][CONNECTIONS])
    if ambiguous or num_open > max_connections:
        exchange.headers.append((b"connection", b"close"))
    if num_open > max_connections:
        raise OverloadedError(f"More than {max_connections} connections are open.")
    if ambiguous:  # a proxy may disagree on where it ends (RFC 9112, 6.1)
        raise InvalidRequestError("content-length and transfer-encoding exclude each other.")


def _check_sizes(scope: Scope, config: ServerConfig) -> None:
    """Refuse large headers that came in one piece: h11 bounds incomplete ones only."""
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


def _check_media_type(headers: Headers) -> None:
    """Refuse bodies of another type, such as forms, which any web page may send.

    JSON may come without a type from what is no browser (LiteLLM sends it so to Ollama's API): a
    browser names the page that sends it.
    """
    kinds = [v.partition(b";")[0].strip().lower() for k, v in headers if k == b"content-type"]
    untyped = not kinds and BROWSERS.isdisjoint(name for name, _ in headers)
    if kinds != [JSON] and not untyped:
        came = b", ".join(kinds)[:100].decode("latin-1") or "absent"
        raise MediaTypeError(f"The content-type is {came}; expected {JSON.decode()}.")
    encodings = {value.strip().lower() for key, value in headers if key == b"content-encoding"}
    if not encodings <= {b"identity"}:
        raise MediaTypeError("Bodies are read without content-encoding.")


def _request_id(scope: Scope) -> str:
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _ID.fullmatch(given) else secrets.token_hex(12)


def _split_target(scope: Scope) -> None:
    """Split a request target that is a whole URL, as proxies' clients send it, into Host and path.

    The URL's host replaces the Host header (RFC 9112, 3.2.2), so that the host that the client
    named is the one that is checked.
    """
    found = _ABSOLUTE.fullmatch(scope["raw_path"])
    if found is None:
        return
    host, path = found.group(1), found.group(2) or b"/"
    scope["raw_path"] = path
    scope["path"] = unquote(path.decode())
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", host), *others]
