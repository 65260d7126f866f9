"""How a server is set up: frozen, checked when built. Knows no sockets and no models."""

import ipaddress
import re
from dataclasses import dataclass, field

from ..errors import InvalidRequestError
from .keys import ApiKeys

TEMPLATE_KWARGS = frozenset(
    {"enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "thinking_budget"}
)
HOST_NAME = r"(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)"  # of a Host header in lower case, without its port
_NAME = re.compile(HOST_NAME)
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{HOST_NAME}(?::\d{{1,5}})?/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses, keys and limits. Seconds are seconds, bytes are bytes.

    Raises:
        InvalidRequestError: a value out of range, a host or origin that is none, or an address
            that others can reach without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one
    keys: ApiKeys = field(default_factory=ApiKeys)
    insecure: bool = False  # reachable by others without a key all the same
    allowed_hosts: tuple[str, ...] = ()  # of the Host header, beside what `host` implies
    allowed_origins: tuple[str, ...] = ()  # of pages elsewhere, such as "https://chat.example"
    max_body_bytes: int = 32 << 20
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    max_connections: int = 512
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 120.0  # that a client may leave its answer unread
    max_waiting: int = 256  # requests that have no token yet
    max_waiting_tokens: int = 4_000_000  # of their prompts together
    deadline_s: float | None = None  # longest that one request may take; None: no limit
    keep_alive_s: float = 10.0  # of silence in a stream before a comment is sent
    ready_deadline_s: float = 10.0  # for a token or a step, or the server is not ready
    open_metrics: bool = False  # this machine may read /metrics without a key
    drain_s: float = 30.0  # that running requests get at the end
    text_workers: int = 4  # threads that render templates and encode prompts
    long_text_workers: int = 2  # the same, for large bodies: others do not wait for their texts
    template_kwargs: frozenset[str] = TEMPLATE_KWARGS  # chat_template_kwargs that clients may set

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError(f"port is {self.port}; expected 0 to 65535.", param="port")
        for host in self.allowed_hosts:
            if not _NAME.fullmatch(host.lower()):
                raise InvalidRequestError(
                    f"--allowed-host is {host!r}; expected a name or address alone, "
                    "such as 'chat.example'.",
                    param="allowed_hosts",
                )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin.lower()):
                raise InvalidRequestError(
                    f"--allowed-origin is {origin!r}; expected scheme, name and port if there is "
                    "one, such as 'https://chat.example'.",
                    param="allowed_origins",
                )
        if not (self.loopback or self.keys or self.insecure):
            raise InvalidRequestError(
                f"{self.host} can be reached from other machines, and no API key is set. "
                "Set one with --api-key or MLXINFER_API_KEY, serve on 127.0.0.1, "
                "or say --insecure.",
                param="host",
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, and nobody else's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
