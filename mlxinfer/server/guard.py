"""Which requests are served: checks of Host, Origin, sizes and media type, before a body is read.

Everything is refused unless a rule allows it. Paths are compared as uvicorn decoded them
(`scope["path"]`), never as a URL put together from the Host header.

A page anywhere on the web can point its own name at 127.0.0.1 and reach a local server through its
visitor's browser (DNS rebinding). The Host header then holds that name, and Origin the page's.
"""

import ipaddress
import re
import socket
from urllib.parse import unquote

from ..errors import InvalidRequestError, MlxinferError, OverloadedError
from .config import HOST_NAME, ServerConfig, is_loopback
from .errors import HttpError
from .http import Headers, Scope
from .keys import values_of
from .protocol import CONNECTIONS

JSON = b"application/json"
BROWSERS = frozenset((b"origin", b"sec-fetch-site", b"referer"))  # headers that they send
# Docker gives the last name to this machine, for containers; `.internal` is in no public DNS.
LOCAL = ("localhost", "127.0.0.1", "[::1]", "host.docker.internal")
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_HOST = re.compile(rf"({HOST_NAME})(?::\d{{1,5}})?")


def split_target(scope: Scope) -> None:
    """Split a request target that is a whole URL, as for proxies, into Host and path.

    The URL's host replaces the Host header (RFC 9112, 3.2.2). So the host that the client named is
    the one that is checked.
    """
    match = _ABSOLUTE.fullmatch(scope["raw_path"])
    if match is None:
        return
    host, path = match.group(1), match.group(2) or b"/"
    scope["raw_path"] = path
    scope["path"] = unquote(path.decode())
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", host), *others]


def framing_problem(scope: Scope, config: ServerConfig) -> MlxinferError | None:
    """Why the connection has to be closed after the answer; None: it may stay."""
    if len(scope["state"][CONNECTIONS]) > config.max_connections:
        return OverloadedError(f"More than {config.max_connections} connections are open.")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        # a proxy may disagree on where the body ends (RFC 9112, 6.1)
        return InvalidRequestError("content-length and transfer-encoding exclude each other.")
    return None


def check_sizes(scope: Scope, config: ServerConfig) -> None:
    """Refuse large headers that came in one piece, because h11 limits only incomplete ones."""
    headers = scope["headers"]
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


def check_media_type(headers: Headers) -> None:
    """Refuse bodies of another type, such as forms, which any web page may send.

    A client that is no browser may send JSON without a type (LiteLLM does, to Ollama's API). A
    browser always names the page that sends it.
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


# -- host names of this server, and origins of pages that may call it ----------------------------


def check_host(scope: Scope, config: ServerConfig) -> None:
    """Raise HttpError for a foreign or malformed Host, or a foreign Origin."""
    host = _value(scope, b"host") or ""
    name = _HOST.fullmatch(host.lower())
    if name is None or not _is_ours(name.group(1), config):
        raise HttpError(
            "forbidden",
            "The Host header is missing, or not a name of this server; allowed-host in the "
            "config file adds one.",
        )
    origin = _value(scope, b"origin")
    origins = (f"http://{host.lower()}", f"https://{host.lower()}")
    if origin is not None and origin.lower() not in origins and not _is_allowed(origin, config):
        raise HttpError(
            "forbidden",
            "Pages of this origin may not use this server; --allowed-origin adds one, and "
            "--allowed-app an app's or an extension's.",
        )


def cors_headers(scope: Scope, config: ServerConfig) -> Headers:
    origin = _value(scope, b"origin")
    if origin is None or not _is_allowed(origin, config):
        return []
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, retry-after"),
        (b"vary", b"origin"),
    ]


def _value(scope: Scope, name: bytes) -> str | None:
    values = values_of(scope["headers"], name, "forbidden")
    return values[0].decode("latin-1") if values else None


def _is_ours(name: str, config: ServerConfig) -> bool:
    if name in LOCAL:
        return True
    if name in (*map(_bracketed, config.hosts), *map(str.lower, config.allowed_hosts)):
        return True
    hostname = socket.gethostname().lower()
    if name in (hostname, f"{hostname.removesuffix('.local')}.local"):
        return True
    if config.loopback:
        return False
    # An address cannot be rebound. A Mac may have several names in its own network; whoever can
    # make one up there can reach the server without it.
    if name.endswith(".local") or _is_address(name):
        return True
    return bool(config.keys) and not config.allowed_hosts  # a page cannot know a key


def _is_allowed(origin: str, config: ServerConfig) -> bool:
    lowered = origin.lower()
    scheme, _, _ = lowered.partition("://")
    return not config.origins.isdisjoint((lowered, f"{scheme}://*"))


def _bracketed(host: str) -> str:
    lowered = host.lower()
    return f"[{lowered}]" if ":" in lowered and not lowered.startswith("[") else lowered


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_open_metrics(scope: Scope, config: ServerConfig) -> bool:
    client = scope.get("client")
    return config.open_metrics and client is not None and is_loopback(client[0])
