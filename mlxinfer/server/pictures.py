"""Pictures that requests name by a URL: fetched from public addresses only, within limits.

A server that fetches what clients name could be made to read from networks that only it reaches.
So a host's addresses are looked up once, all of them have to be public, and the connection goes to
the address that was checked. A redirect is followed by the same rule.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from ..errors import PictureError, shown
from .workers import in_background

MAX_BYTES = 32 << 20
TIMEOUT_S = 15.0  # of all of it: names, connections, redirects and the data
REQUEST_BYTES = 128 << 20  # of all pictures of a request
REQUEST_S = 30.0  # after which a request begins no further picture
MAX_REDIRECTS = 3
CHUNK = 1 << 16
REDIRECTS = (301, 302, 303, 307, 308)
TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
UNICAST = ipaddress.ip_network("2000::/3")  # all that is given to networks of the internet


def refuse_urls(url: str, place: str) -> bytes:
    """Raise PictureError: this server fetches no pictures."""
    raise PictureError.of(
        place,
        "is an http URL, and this server fetches no pictures; send the picture itself as a data: "
        "URL. It fetches where it is started with --fetch-images.",
    )


class PictureFetches:
    """Fetches the pictures of one request, each URL once, within limits for all of them."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}
        self._deadline = time.monotonic() + REQUEST_S

    def fetch(self, url: str, place: str) -> bytes:
        data = self._found.get(url)
        if data is None:
            if time.monotonic() > self._deadline:
                raise _refused(f"comes too late: all have {REQUEST_S:g} seconds", place)
            data = self._found[url] = fetch_picture(url, place)
            if sum(map(len, self._found.values())) > REQUEST_BYTES:
                raise _refused(f"is too much: all may have {REQUEST_BYTES:,} bytes", place)
        return data


def fetch_picture(url: str, place: str) -> bytes:
    """The data behind an http or https URL. Takes a while.

    Args:
        url: from a request.

    Raises:
        PictureError: the URL leads to an address that is not public, to something that is no
            picture, or to more than 32 MiB; or it takes more than 15 seconds.
    """
    deadline = time.monotonic() + TIMEOUT_S
    try:
        for _ in range(MAX_REDIRECTS + 1):
            reply = _get(urlsplit(url), deadline, place)
            if isinstance(reply, bytes):
                return reply
            url = urljoin(url, reply)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _refused(f"cannot be fetched: {error or type(error).__name__}", place) from None
    raise _refused(f"redirects more than {MAX_REDIRECTS} times", place)


def public_address(host: str, port: int, deadline: float, place: str) -> str:
    """An address of a host; raises PictureError unless all addresses of the host are public."""
    # a resolver that does not answer keeps its thread for as long as it likes
    lookup = in_background(
        lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), "mlxinfer-names"
    )
    results = lookup.result(_left(deadline))
    addresses = [str(address[0]) for *_, address in results]
    for address in addresses:
        if not _is_public(address):
            raise _refused("leads to an address that is not public", place)
    return addresses[0]


def _is_public(address: str) -> bool:
    """Whether an address is one of the internet, also where it is one of IPv4 in IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        # 64:ff9b::/96 leads to IPv4 addresses through a translator
        if parsed in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is None and parsed not in UNICAST:
            return False
        if inner is not None and not _is_public(str(inner)):
            return False
    return parsed.is_global and not parsed.is_multicast


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever the name leads to meanwhile."""

    def __init__(self, url: SplitResult, address: str, deadline: float) -> None:
        self.default_port = 443 if url.scheme == "https" else 80  # the Host header leaves it out
        # without a port the base class would take the end of an IPv6 address for one
        super().__init__(url.hostname or "", url.port or self.default_port)
        self._url, self._address, self._deadline = url, address, deadline
        self._kept: socket.socket | None = None  # `sock` is None while the answer is read

    def connect(self) -> None:
        address = (self._address, self.port)
        self.sock = self._kept = socket.create_connection(address, _left(self._deadline))
        if self._url.scheme == "https":
            context, name = ssl.create_default_context(), self._url.hostname
            begun = context.wrap_socket(
                self.sock, server_hostname=name, do_handshake_on_connect=False
            )
            self.sock = self._kept = begun
            begun.do_handshake()

    def cut(self) -> None:
        """End the connection under whoever waits for it, on another thread."""
        with suppress(OSError):  # it is closed already
            if self._kept is not None:
                self._kept.shutdown(socket.SHUT_RDWR)


def _get(url: SplitResult, deadline: float, place: str) -> bytes | str:
    if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
        raise _refused("is no http URL, or has a name and a password in it", place)
    port = url.port or (443 if url.scheme == "https" else 80)
    address = public_address(url.hostname, port, deadline, place)
    connection = _PinnedConnection(url, address, deadline)
    # a timeout of a socket holds for each of its reads, and a server may send byte after byte
    timer = threading.Timer(_left(deadline), connection.cut)
    timer.daemon = True
    timer.start()
    try:
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("GET", path, headers={"accept": "image/*", "user-agent": "mlxinfer"})
        answer = connection.getresponse()
        if answer.status in REDIRECTS and (target := answer.getheader("location")):
            return target
        return _data(answer, deadline, place)
    except (OSError, http.client.HTTPException):
        _left(deadline)
        raise
    finally:
        timer.cancel()
        connection.close()


def _data(answer: http.client.HTTPResponse, deadline: float, place: str) -> bytes:
    if answer.status != 200:
        raise _refused(f"is answered with status {answer.status}", place)
    kind = answer.getheader("content-type", "application/octet-stream")
    if not kind.lower().startswith(TYPES):
        raise _refused(f"is of type {shown(kind)}; expected a picture", place)
    data = bytearray()
    while chunk := answer.read1(CHUNK):
        data += chunk
        if len(data) > MAX_BYTES:
            raise _refused(f"has more than {MAX_BYTES:,} bytes", place)
    _left(deadline)
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"it takes more than {TIMEOUT_S:g} seconds")
    return left


def _refused(why: str, place: str) -> PictureError:
    return PictureError(f"The picture of {place} {why}.", param=place)
