"""The outermost ASGI layer: which requests are served, and what every answer carries.

Everything is refused unless a rule allows it. Paths are compared as uvicorn decoded them
(`scope["path"]`), never as a URL put together from the Host header.

A page anywhere on the web can point its own name at 127.0.0.1 and reach a local server through its
visitor's browser (DNS rebinding). The Host header then holds that name, and Origin the page's.
"""

import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Set
from urllib.parse import unquote

from ..errors import InvalidRequestError, MlxinferError, OverloadedError
from .config import HOST_NAME, ServerConfig, is_loopback
from .errors import HttpError
from .http import (
    Access,
    ClientGoneError,
    ErrorForm,
    Headers,
    Message,
    Receive,
    Route,
    RouteTable,
    Scope,
    Send,
    error_reply,
    logged,
    send_body,
)
from .protocol import CONNECTIONS

METRICS = "/metrics"
POLLED = frozenset(  # logged at level info only on errors
    {"/health", "/ready", "/admin/state", "/hub/jobs", METRICS}
)
JSON = b"application/json"
BROWSERS = frozenset((b"origin", b"sec-fetch-site", b"referer"))  # headers that they send
CLIENT_GONE = 499  # the log's status of a request after its client disconnected
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_HOST = re.compile(rf"({HOST_NAME})(?::\d{{1,5}})?")
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    # SDKs send many headers of their own; `*` does not cover authorization
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
)
access_log = logging.getLogger("mlxinfer.access")
log = logging.getLogger("mlxinfer.server")

Answer = Callable[[Route, Scope, Receive, Send], Awaitable[None]]
Forms = Callable[[str, Set[bytes]], ErrorForm]  # of a path and the names of a request's headers


class Guard:
    """Checks a request, answers it by its route, and turns exceptions into error replies.

    Args:
        answer: answers a request that passed; the path's parameters are in the scope.
        config: keys and limits.
        routes: of the server.
        forms: the form of errors.
    """

    def __init__(
        self, answer: Answer, config: ServerConfig, routes: RouteTable, forms: Forms
    ) -> None:
        self._answer = answer
        self._config = config
        self._routes = routes
        self._forms = forms
        self._hosts = HostRules(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and write its line of the access log."""
        if scope["type"] != "http":
            return
        _split_target(scope)
        scope["path"] = self._canonical(scope["path"])
        names = {name for name, _ in scope["headers"]}
        exchange = Exchange(scope, send, self._forms(scope["path"], names))
        try:
            self._check_framing(exchange, scope)
            if not await self._hosts.answer_preflight(scope, exchange.send):
                route = self._admit(scope)
                exchange.headers += self._hosts.response_headers(scope)
                await self._answer(route, scope, receive, exchange.send)
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
        if self._routes.serves(path) and not path.endswith("/"):
            return path
        plain = path.rstrip("/")
        for meant in (plain.removeprefix("/v1"), plain, f"/v1{plain}"):
            if meant.startswith("/v1/") and self._routes.serves(meant):
                return meant
        return path

    def _admit(self, scope: Scope) -> Route:
        """The route of a request that may be answered; a path is not looked up without a key."""
        headers = scope["headers"]
        self._check_sizes(scope)
        self._hosts.check(scope)
        route, missing = None, None
        try:
            route, scope["path_params"] = self._routes.find(scope["method"], scope["path"])
        except MlxinferError as error:
            missing = error
        self._check_key(scope, "key" if route is None else route.access)
        if scope["method"] == "POST":
            self._check_media_type(headers)
        if route is None:
            assert missing is not None
            raise missing
        return route

    def _check_key(self, scope: Scope, access: Access) -> None:
        """Raise HttpError unless the request's key has this access."""
        if access == "anyone" or self._is_open_metrics(scope):
            return
        keys = self._config.keys
        key = keys.name_of(scope["headers"])
        if key is not None:
            scope["mlxinfer.log"]["key"] = key
        if access == "admin":
            keys.require_admin(key)

    def _is_open_metrics(self, scope: Scope) -> bool:
        """Whether this request for /metrics comes from this machine, where that needs no key."""
        if scope["path"] != METRICS or not self._config.open_metrics:
            return False
        client = scope.get("client")
        return client is not None and is_loopback(client[0])

    def _check_framing(self, exchange: "Exchange", scope: Scope) -> None:
        """Refuse requests after which the connection has to be closed."""
        max_connections = self._config.max_connections
        names = {name for name, _ in scope["headers"]}
        ambiguous = names >= {b"content-length", b"transfer-encoding"}
        num_open = len(scope["state"][CONNECTIONS])
        if ambiguous or num_open > max_connections:
            exchange.headers.append((b"connection", b"close"))
        if num_open > max_connections:
            raise OverloadedError(f"More than {max_connections} connections are open.")
        if ambiguous:  # a proxy may disagree on where the body ends (RFC 9112, 6.1)
            raise InvalidRequestError("content-length and transfer-encoding exclude each other.")

    def _check_sizes(self, scope: Scope) -> None:
        """Refuse large headers that came in one piece: h11 bounds incomplete ones only."""
        headers, config = scope["headers"], self._config
        if len(headers) > config.max_headers:
            raise HttpError(
                "headers_too_large",
                f"{len(headers)} headers came; at most {config.max_headers} are read. Send fewer.",
            )
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + len(b": \r\n") for name, value in headers)
        if size > config.max_header_bytes:
            raise HttpError(
                "headers_too_large",
                f"Path and headers have {size} bytes; at most {config.max_header_bytes} are read. "
                "Send shorter ones.",
            )

    def _check_media_type(self, headers: Headers) -> None:
        """Refuse bodies of another type, such as forms, which any web page may send.

        JSON may come without a type from a client that is no browser (LiteLLM sends it so to
        Ollama's API): a browser names the page that sends it.
        """
        kinds = [v.partition(b";")[0].strip().lower() for k, v in headers if k == b"content-type"]
        untyped = not kinds and BROWSERS.isdisjoint(name for name, _ in headers)
        if kinds != [JSON] and not untyped:
            came = b", ".join(kinds)[:100].decode("latin-1") or "absent"
            raise HttpError(
                "unsupported_media_type", f"The content-type is {came}; expected {JSON.decode()}."
            )
        encodings = {value.strip().lower() for key, value in headers if key == b"content-encoding"}
        if not encodings <= {b"identity"}:
            raise HttpError("unsupported_media_type", "Bodies are read without content-encoding.")


class Exchange:
    """One request and its answer: headers that every answer carries, and the access log."""

    def __init__(self, scope: Scope, send: Send, form: ErrorForm) -> None:
        self._scope = scope
        self._send = send
        self._began_s = time.monotonic()
        self.form = scope["mlxinfer.form"] = form
        self.id = scope["mlxinfer.id"] = _request_id(scope)
        self.status: int | None = None
        self.headers = [(name, self.id.encode()) for name in (b"x-request-id", *form.id_headers)]
        scope["mlxinfer.log"] = {}

    async def send(self, message: Message) -> None:
        """Pass a message on, the first one with the headers that every answer carries."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with an error, unless the answer has begun."""
        self._scope["mlxinfer.log"].update(logged(error))
        reply = error_reply(error, self.form)
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


class HostRules:
    """Host names of this server, and origins of pages that may call it."""

    def __init__(self, config: ServerConfig) -> None:
        names = {*LOCAL, *map(_bracketed, config.hosts), *map(str.lower, config.allowed_hosts)}
        if not config.loopback:
            own = socket.gethostname().lower()
            names |= {own, f"{own.removesuffix('.local')}.local"}
        self._names = frozenset(names)
        # a page cannot know a key, so with keys any name is safe; addresses cannot be rebound
        self._any_name = bool(config.keys) and not config.loopback and not config.allowed_hosts
        self._any_address = not config.loopback
        self._origins = config.origins

    def check(self, scope: Scope) -> None:
        """Raise HttpError for a foreign or malformed Host, or a foreign Origin."""
        host = _only(scope, b"host")
        name = _HOST.fullmatch(host.lower()) if host is not None else None
        if name is None or not self._answers_to(name.group(1)):
            raise HttpError(
                "forbidden",
                "The Host header is missing, or not a name of this server; allowed-host in the "
                "config file adds one.",
            )
        origin = _only(scope, b"origin")
        if origin is not None and not self._may_ask(origin, host or ""):
            raise HttpError(
                "forbidden",
                "Pages of this origin may not use this server; --allowed-origin adds one, and "
                "--allowed-app an app's or an extension's.",
            )

    async def answer_preflight(self, scope: Scope, send: Send) -> bool:
        """Answer a CORS preflight request; False: the request is none."""
        asked = b"access-control-request-method" in dict(scope["headers"])
        if scope["method"] != "OPTIONS" or not asked:
            return False
        self.check(scope)
        headers = [*_PREFLIGHT, *self.response_headers(scope)]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return True

    def response_headers(self, scope: Scope) -> Headers:
        """CORS headers of an answer to a page of an allowed origin."""
        origin = _only(scope, b"origin")
        if origin is None or not self._is_allowed(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def _answers_to(self, name: str) -> bool:
        if name in self._names or self._any_name:
            return True
        return self._any_address and _is_address(name)

    def _may_ask(self, origin: str, host: str) -> bool:
        same = origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
        return same or self._is_allowed(origin)

    def _is_allowed(self, origin: str) -> bool:
        lowered = origin.lower()
        scheme, _, _ = lowered.partition("://")
        return lowered in self._origins or f"{scheme}://*" in self._origins


def _only(scope: Scope, name: bytes) -> str | None:
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise HttpError("forbidden", f"The header {name.decode()} was sent {len(values)} times.")
    return values[0].decode("latin-1") if values else None


def _bracketed(host: str) -> str:
    lowered = host.lower()
    return f"[{lowered}]" if ":" in lowered and not lowered.startswith("[") else lowered


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


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
