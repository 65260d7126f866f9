"""Several servers behind a router: where they are, and the file that tells a router of them.

mlxinfer has no router of its own. smg (pypi.org/project/smg, cache-aware routing) stands in front
of plain servers and reads a file of workers; the form is that of smg 1.13, `--discovery-provider
file`: version 1, and for each worker a URL and the model that it serves.
"""

import contextlib
import errno
import ipaddress
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .errors import InvalidRequestError
from .http_json import ServerError, exchange

SERVICE = "_mlxinfer._tcp.local."  # by which servers are found in the local network (RFC 6763)
ANSWER_S = 5.0  # that a server has to answer
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
    """Each server with its models, or with why it does not answer.

    Raises:
        InvalidRequestError: no URL, or no private host; prompts and keys go to it unencrypted.
    """
    return [_asked(checked_url(url), key) for url in urls]


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
    if found.scheme not in ("http", "https") or not host or found.path.strip("/"):
        raise InvalidRequestError(
            f"{text[:80]!r} is no address of a server such as 'http://studio.local:8080'.",
            param="url",
        )
    if found.scheme == "http" and _is_public(host):
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
    """The file of workers as plain data; a server with one model is entered under its name."""
    return {"version": 1, "workers": [_entry(worker) for worker in workers]}


def discover(seconds: float, interfaces: Sequence[str] = ()) -> list[str]:
    """Addresses of the servers that announce themselves in the local network, sorted.

    Args:
        seconds: to listen for.
        interfaces: addresses of this machine to listen at; empty: all.

    Raises:
        InvalidRequestError: zeroconf is not installed.
    """
    zeroconf = _zeroconf()
    found: dict[str, str] = {}

    class Listener(zeroconf.ServiceListener):  # type: ignore[name-defined]
        def add_service(self, zc: Any, type_: str, name: str) -> None:
            info = zc.get_service_info(type_, name)
            if info is not None and (addresses := info.parsed_scoped_addresses()):
                host = addresses[0]
                scheme = (info.decoded_properties or {}).get("scheme") or "http"
                shown = f"[{host}]" if ":" in host else host
                found[name] = f"{scheme}://{shown}:{info.port}"

        def update_service(self, zc: Any, type_: str, name: str) -> None:
            self.add_service(zc, type_, name)

        def remove_service(self, zc: Any, type_: str, name: str) -> None:
            found.pop(name, None)

    with contextlib.closing(_network(zeroconf, interfaces)) as network:
        zeroconf.ServiceBrowser(network, SERVICE, Listener())
        time.sleep(seconds)
    return sorted(set(found.values()))


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
    return zeroconf.Zeroconf(interfaces=list(interfaces) or zeroconf.InterfaceChoice.All)


def _asked(url: str, key: str | None) -> Worker:
    try:
        answer = exchange(url, "/v1/models", None, key=key, timeout_s=ANSWER_S)
        return Worker(url, tuple(str(each["id"]) for each in answer["data"]))
    except ServerError as error:
        return Worker(url, problem=str(error))
    except (KeyError, TypeError):
        return Worker(url, problem=f"{url}/v1/models is no list of models.")


def _entry(worker: Worker) -> dict[str, str]:
    model = {"model_id": worker.models[0]} if len(worker.models) == 1 else {}
    return {"id": worker.url, "url": worker.url, **model}


def _is_public(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "." in host and not host.rstrip(".").endswith(PRIVATE_NAMES)
    return address.is_global


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
