"""The configuration of a server: frozen, checked when built."""

import ipaddress
import re
from dataclasses import dataclass, field

from ..errors import InvalidRequestError, wrong_value
from .keys import ApiKeys

HOST_NAME = r"(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)"  # of a Host header in lower case, without its port
# Origins of apps that are web pages inside, and of browser extensions, which have an id of each
# installation. `scheme://*` stands for any host.
APP_ORIGINS = {
    "obsidian": ("app://obsidian.md", "capacitor://localhost"),
    "tauri": ("tauri://localhost", "http://tauri.localhost", "https://tauri.localhost"),
    "capacitor": ("capacitor://localhost", "ionic://localhost"),
    "electron": ("app://*", "file://*"),
    "vscode": ("vscode-webview://*", "vscode-file://*"),
    "raycast": ("raycast://*",),
    "chrome-extensions": ("chrome-extension://*",),
    "firefox-extensions": ("moz-extension://*",),
    "safari-extensions": ("safari-web-extension://*",),
}
_ORIGIN = rf"[a-z][a-z0-9+.-]*://{HOST_NAME}(?::\d{{1,5}})?/?"
_FORMS = (  # of the values of an option, and words for them
    ("allowed-host", HOST_NAME, "a name or address alone, such as 'chat.example'"),
    ("--allowed-origin", _ORIGIN, "scheme, name and port if any, such as 'https://chat.example'"),
    ("--allowed-app", "|".join(APP_ORIGINS), f"one of {', '.join(APP_ORIGINS)}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses, keys and limits. Seconds are seconds, bytes are bytes.

    Raises:
        InvalidRequestError: a value out of range, an invalid host or origin, or an address that
            other machines can reach while there is no key.
    """

    host: str | tuple[str, ...] = "127.0.0.1"  # an address to listen on, or several
    port: int = 8080  # of all of them; 0: any free one
    keys: ApiKeys = field(default_factory=ApiKeys)
    insecure: bool = False  # other machines may connect without a key
    allowed_hosts: tuple[str, ...] = ()  # Host headers, beside what `host` implies
    allowed_origins: tuple[str, ...] = ()  # of pages: "https://chat.example"
    allowed_apps: tuple[str, ...] = ()  # names of APP_ORIGINS
    adapter_folders: tuple[str, ...] = ()  # that requests may load adapters of
    fetch_images: bool = False  # pictures that requests name by a public http URL are fetched
    share_prefixes: bool = False  # of several keys: one finds what another has asked in the cache
    share_by_address: bool = False  # without keys each client's address has its share, not all one
    allow_peers: bool = False  # administrators' keys may ask for pages of the prefix cache
    tls_cert: str | None = None  # file with the certificate chain, PEM; None: no TLS
    tls_key: str | None = None  # file with its private key, PEM
    max_body_bytes: int = 32 << 20
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    max_connections: int = 512
    max_connections_per_client: int = 384  # of one address; its oldest idle ones are closed
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 120.0  # that a message of an answer may wait to be read
    max_waiting: int = 256  # requests without a token
    max_waiting_tokens: int = 4_000_000  # prompt tokens of waiting requests
    deadline_s: float | None = None  # of one request; None: no limit
    keep_alive_s: float = 10.0  # of silence in a stream until a comment is sent
    ready_deadline_s: float = 10.0  # for a token or steps, else the server is not ready
    open_metrics: bool = False  # /metrics needs no key on this machine
    keep_awake: bool = True  # a Mac does not sleep while requests run
    drain_s: float = 30.0  # that running requests get at shutdown
    text_workers: int = 4  # threads that render templates and encode prompts
    long_text_workers: int = 2  # the same for large bodies, so that others do not wait for them
    image_fetchers: int = 8  # threads that fetch pictures, each those of one request

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError.of("port", f"is {self.port}; expected 0 to 65535.")
        if not self.hosts:
            raise InvalidRequestError.of("host", "names no address to listen on.")
        for option, form, expected in _FORMS:
            name = option.strip("-").replace("-", "_") + "s"
            for value in getattr(self, name):
                if not re.fullmatch(form, value, re.IGNORECASE):
                    raise wrong_value(option, value, expected, name)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequestError("--tls-cert and --tls-key go together.", param="tls_cert")
        if not (self.loopback or self.keys or self.insecure):
            open_host = next(host for host in self.hosts if not is_loopback(host))
            raise InvalidRequestError(
                f"{open_host} can be reached from other machines, and no API key is set. "
                "Set one with --api-key or MLXINFER_API_KEY, serve on 127.0.0.1, "
                "or say --insecure.",
                param="host",
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,) if isinstance(self.host, str) else tuple(dict.fromkeys(self.host))

    @property
    def origins(self) -> frozenset[str]:
        """Allowed origins in lower case, those of named apps included; `scheme://*` is any host."""
        apps = [origin for app in self.allowed_apps for origin in APP_ORIGINS[app.lower()]]
        return frozenset(origin.lower().rstrip("/") for origin in (*self.allowed_origins, *apps))

    @property
    def loopback(self) -> bool:
        return all(map(is_loopback, self.hosts))


def network_of(address: str) -> str:
    """The address of a client; of IPv6 its network of 64 bits, whose addresses one client has."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
