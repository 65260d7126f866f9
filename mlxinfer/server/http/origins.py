"""Allowed Host and Origin headers, and CORS for allowed pages.

A page anywhere on the web can point its own name at 127.0.0.1 and reach a local server through its
visitor's browser (DNS rebinding). The Host header then holds that name, and Origin the page's.
"""

import ipaddress
import re
import socket

from starlette.types import Scope, Send

from ..errors import ForbiddenError
from ..settings import HOST_NAME, ServerConfig
from .replies import Headers

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(rf"({HOST_NAME})(?::\d{{1,5}})?")
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    # SDKs send many headers of their own; `*` does not cover authorization
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
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
        """Raise ForbiddenError for a foreign or malformed Host, or a foreign Origin."""
        host = _only(scope, b"host")
        name = _HOST.fullmatch(host.lower()) if host is not None else None
        if name is None or not self._answers_to(name.group(1)):
            raise ForbiddenError(
                "The Host header is missing, or not a name of this server; --allowed-host adds one."
            )
        origin = _only(scope, b"origin")
        if origin is not None and not self._may_ask(origin, host or ""):
            raise ForbiddenError(
                "Pages of this origin may not use this server; --allowed-origin adds one, and "
                "--allowed-app an app's or an extension's."
            )

    async def answer_preflight(self, scope: Scope, send: Send) -> bool:
        """Answer a CORS preflight request; False: it is none."""
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
        raise ForbiddenError(f"The header {name.decode()} was sent {len(values)} times.")
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
