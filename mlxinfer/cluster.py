"""Several servers behind a router: where they are, and the file that tells a router of them.

mlxinfer has no router of its own. smg (pypi.org/project/smg, cache-aware routing) stands in front
of plain servers and reads a file of workers; the form is that of smg 1.13, `--discovery-provider
file`: version 1, and for each worker a URL and the model that it serves.
"""

import contextlib
import errno
import ipaddress
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .errors import InvalidRequestError
from .http_json import ServerError, exchange

SERVICE = "_mlxinfer._tcp.local."  # by which servers are found in the local network (RFC 6763)
SCHEMES = {"http": 80, "https": 443}
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*)(\.[a-z0-9_]([a-z0-9_-]*))*\.?")
ANSWER_S = 5.0  # that a server may be silent for
ASKED_AT_ONCE = 32
MAX_ANNOUNCED = 256  # names taken from the network
RESOLVE_S = 0.5  # for an announcement that came in parts
PRIVATE_NAMES = (".local", ".lan", ".internal", ".home.arpa")
MDNS = ("224.0.0.251", 5353)
INSTALL = 'Finding servers by mDNS takes zeroconf: pip install "mlxinfer[cluster]"'


@dataclass(frozen=True, slots=True)
class Worker:
    """One server.

    Attributes:
        url: such as "http://studio.local:8080".
        models: that it serves; empty: it was not asked.
        problem: why it did not answer.
    """

    url: str
    models: tuple[str, ...] = ()
    problem: str | None = None


def ask(urls: Sequence[str], key: str | None = None) -> list[Worker]:
    """Each server with its models, or with why it does not answer; a server named twice once.

    Servers are asked at the same time, and the answers awaited for some seconds: one that sends
    its answer byte by byte holds up no others.

    Raises:
        InvalidRequestError: no URL, or no private host; prompts and keys go to it unencrypted.
    """
    places: dict[tuple[str | None, int], str] = {}
    for url in map(checked_url, urls):
        places.setdefault(_endpoint(url), url)
    wanted = list(places.values())
    waiting, found = wanted[::-1], dict[str, Worker]()

    def work() -> None:
        while waiting:
            with contextlib.suppress(IndexError):  # another thread took the last
                url = waiting.pop()
                found[url] = _asked(url, key)

    threads = [threading.Thread(target=work, daemon=True) for _ in wanted[:ASKED_AT_ONCE]]
    until_s = time.monotonic() + 2 * ANSWER_S * math.ceil(len(wanted) / ASKED_AT_ONCE)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    late = "The answer did not end in time."
    return [found.get(url) or Worker(url, problem=late) for url in wanted]


def checked_url(text: str) -> str:
    """A server's address without a path; "host:port" becomes http.

    Raises:
        InvalidRequestError: it is none, has more than scheme, host and port, or is a public address
            over plain http.
    """
    try:
        found = urlsplit(text if "://" in text else f"http://{text}")
        host, port = found.hostname or "", found.port
    except ValueError:
        found, host, port = urlsplit(""), "", None
    address = _address(host)
    named = address is not None or (len(host) < 254 and HOST_NAME.fullmatch(host) is not None)
    plain = text.isascii() and text.isprintable() and " " not in text and port != 0
    if not (named and plain) or found.scheme not in SCHEMES or found.path.strip("/"):
        raise InvalidRequestError(
            f"{text[:80]!r} is no address of a server such as 'http://studio.local:8080'.",
            param="url",
        )
    if address is not None and (address.is_unspecified or address.is_multicast):
        raise InvalidRequestError(
            f"{host} is the address of no machine; give the one at which others reach the server.",
            param="url",
        )
    public = address.is_global if address is not None else _is_public(host)
    if found.scheme == "http" and public:
        raise InvalidRequestError(
            f"{host} is a public address: prompts would cross networks unencrypted. Use https, or "
            "an address of your own network.",
            param="url",
        )
    for name, given in (
        ("a user or password", found.username or found.password),
        ("a query", found.query),
        ("a fragment", found.fragment),
    ):
        if given:
            raise InvalidRequestError(
                f"The address of {host} has {name}, which would not be sent; leave it out. Keys "
                "have an option of their own.",
                param="url",
            )
    shown = f"[{host}]" if ":" in host else host
    return f"{found.scheme}://{shown}:{port}" if port else f"{found.scheme}://{shown}"


def manifest(workers: Sequence[Worker]) -> dict[str, Any]:
    """The file of workers as plain data.

    A router of this form sends a server requests for one model: the first that it serves.
    """
    return {"version": 1, "workers": [_entry(worker) for worker in workers]}


def discover(seconds: float, interfaces: Sequence[str] = ()) -> list[str]:
    """Addresses of the servers that announce themselves in the local network, sorted.

    Any device of the network can announce any address. What is no address of a private network
    is left out, and so is what comes after the first MAX_ANNOUNCED names.

    Args:
        seconds: to listen for; as long again at most for announcements that came in parts.
        interfaces: addresses of this machine to listen at; empty: all.

    Raises:
        InvalidRequestError: zeroconf is not installed, or there is no network.
    """
    zeroconf = _zeroconf()
    names: dict[str, None] = {}

    class Listener(zeroconf.ServiceListener):  # type: ignore[name-defined]
        def add_service(self, zc: Any, type_: str, name: str) -> None:
            if len(names) < MAX_ANNOUNCED:
                names[name] = None

        def update_service(self, zc: Any, type_: str, name: str) -> None:
            self.add_service(zc, type_, name)

        def remove_service(self, zc: Any, type_: str, name: str) -> None:
            names.pop(name, None)

    found = set[str]()
    with contextlib.closing(_network(zeroconf, interfaces)) as network:
        zeroconf.ServiceBrowser(network, SERVICE, Listener())
        time.sleep(seconds)
        until_s = time.monotonic() + seconds
        announced = [zeroconf.ServiceInfo(SERVICE, name) for name in list(names)]
        partial = [info for info in announced if not info.load_from_cache(network)]
        for info in partial:  # one that never comes whole must not hold up the others
            if (left_s := until_s - time.monotonic()) > 0:
                info.request(network, min(left_s, RESOLVE_S) * 1000)
        for info in announced:
            if addresses := info.parsed_scoped_addresses():
                host = addresses[0]
                scheme = (info.decoded_properties or {}).get("scheme") or "http"
                shown = f"[{host}]" if ":" in host else host
                with contextlib.suppress(InvalidRequestError):
                    found.add(checked_url(f"{scheme}://{shown}:{info.port}"))
    return sorted(found)


@contextlib.contextmanager
def advertised(
    host: str, port: int, *, tls: bool, interfaces: Sequence[str] = ()
) -> Iterator[None]:
    """Announce a server in the local network while the block runs.

    Args:
        host: address that it listens at; that of this machine where it is 0.0.0.0 or ::.
        interfaces: addresses of this machine to announce it at; empty: all.

    Raises:
        InvalidRequestError: zeroconf is not installed.
    """
    zeroconf = _zeroconf()
    anywhere = host in ("0.0.0.0", "::")
    addresses = _own_addresses() if anywhere else [host]
    name = socket.gethostname().partition(".")[0] or "mlxinfer"
    # Addresses belong to the name of a host: servers at different ones, and machines that are
    # called alike, would get each other's.
    host_name = f"mlxinfer-{secrets.token_hex(6)}.local."
    info = zeroconf.ServiceInfo(
        SERVICE,
        f"{name}-{port}.{SERVICE}",
        port=port,
        parsed_addresses=addresses,
        properties={"scheme": "https" if tls else "http"},
        server=host_name,
    )
    with contextlib.closing(_network(zeroconf, interfaces)) as network:
        network.register_service(info, allow_name_change=True)
        try:
            yield
        finally:
            network.unregister_service(info)


def local_network_problem() -> str | None:
    """Why this process cannot speak to the local network; None: it can.

    macOS 15 and later ask the user for each app; without the permission nothing arrives, and what
    is sent fails with "no route to host" (developer.apple.com, TN3179).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.sendto(b"\0" * 12, MDNS)  # an empty question, which is not answered
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.EPERM):
            return (
                "not allowed: System Settings > Privacy & Security > Local Network, and switch on "
                "the terminal or app that runs mlxinfer"
            )
        return f"no local network: {error.strerror or error}"
    return None


def _network(zeroconf: Any, interfaces: Sequence[str]) -> Any:
    try:
        return zeroconf.Zeroconf(interfaces=list(interfaces) or zeroconf.InterfaceChoice.All)
    except (RuntimeError, OSError) as error:  # the former: no interface that is up
        raise InvalidRequestError(f"There is no network for mDNS: {error}.", param="mdns") from None


def _asked(url: str, key: str | None) -> Worker:
    try:
        answer = exchange(url, "/v1/models", None, key=key, timeout_s=ANSWER_S)
        models = tuple(each["id"] for each in answer["data"])
    except ServerError as error:
        return Worker(url, problem=str(error))
    except (KeyError, TypeError):
        models = (None,)
    if not all(isinstance(name, str) and name.isprintable() for name in models):
        return Worker(url, problem=f"{url}/v1/models is no list of models.")
    return Worker(url, models)


def _entry(worker: Worker) -> dict[str, str]:
    model = {"model_id": worker.models[0]} if worker.models else {}
    return {"id": worker.url, "url": worker.url, **model}


def _endpoint(url: str) -> tuple[str | None, int]:
    """What two URLs of one server have in common; a router refuses a file that has it twice."""
    found = urlsplit(url)
    return found.hostname, found.port or SCHEMES[found.scheme]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is; None: a name. Routers take none of a link (`%en0`)."""
    if ":" in host:
        return None if "%" in host else ipaddress.IPv6Address(host)
    with contextlib.suppress(OSError):  # `127.1` and `2130706433` are addresses as well
        return ipaddress.IPv4Address(socket.inet_aton(host))
    return None


def _is_public(name: str) -> bool:
    return "." in name and not name.rstrip(".").endswith(PRIVATE_NAMES)


def _own_addresses() -> list[str]:
    """Addresses of this machine in its network; the probe sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(MDNS)
            return [probe.getsockname()[0]]
        except OSError:
            return ["127.0.0.1"]


def _zeroconf() -> Any:
    try:
        import zeroconf
    except ImportError as error:
        raise InvalidRequestError(INSTALL, param="mdns") from error
    return zeroconf
