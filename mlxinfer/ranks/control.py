"""Control connections between rank 0 and the others: frames of bytes, and which may connect.

Both sides prove that they know a shared secret before anything else is said: each answers the
other's random number with an HMAC of both numbers. What follows is not encrypted: links are
private networks, and public addresses are refused (hosts.py).
"""

import contextlib
import hmac
import math
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ..errors import RanksFailedError

T = TypeVar("T")
NONCE = 32  # bytes
MAX_FRAME = 1 << 28  # bytes
MAX_UNPROVEN = 1 << 12  # bytes of a frame, before the other side has proved itself
HANDSHAKE_S = 10.0  # that a connection may take to prove itself, all in all
RETRY_S = 0.2


class Connection:
    """One control connection: whole frames in both directions."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._deadline_s = time.monotonic() + HANDSHAKE_S
        self._max_frame = MAX_UNPROVEN

    def send(self, frame: bytes) -> None:
        """Send a frame; OSError where the other side has left."""
        self._socket.sendall(struct.pack("<I", len(frame)) + frame)

    def receive(self) -> bytes:
        """The next frame; EOFError or OSError where the other side has left."""
        (length,) = struct.unpack("<I", self._exactly(4))
        if length > self._max_frame:
            raise EOFError(f"a frame of {length} bytes")
        return self._exactly(length)

    def close(self) -> None:
        """End it, for both sides and for a thread that waits for a frame."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def is_closed(self) -> bool:
        """Whether the other side has left. What it sent stays to be received."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def trust(self) -> None:
        """The other side has proved itself: frames may be large, and may take their time."""
        self._max_frame, self._deadline_s = MAX_FRAME, math.inf
        self._socket.settimeout(None)

    def _exactly(self, count: int) -> bytes:
        parts, missing = [], count
        while missing:
            if self._deadline_s < math.inf:  # of all parts together, however slowly they drip
                self._socket.settimeout(max(self._deadline_s - time.monotonic(), 0.001))
            part = self._socket.recv(min(missing, 1 << 20))
            if not part:
                raise EOFError("the connection was closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class Hello(msgspec.Struct, array_like=True):
    """What a rank says of itself."""

    rank: int
    size: int
    version: str
    pid: int


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket that waits for ranks at one address of this machine, and at no other.

    Raises:
        RanksFailedError: the port is taken, or the address is not this machine's.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise RanksFailedError(
            f"Rank 0 cannot wait for the others at {address[0]} port {address[1]}: "
            f"{error.strerror}. Expected a free port of an address of this machine."
        ) from None
    return listener


def accept(
    listener: socket.socket, secret: bytes, own: Hello, deadline_s: float
) -> tuple[Connection, Hello] | None:
    """The next rank that connects and proves itself; None: none did before the deadline, or one
    that came did not.

    Raises:
        RanksFailedError: it is another version, or no other rank of a group of this size.
    """
    listener.settimeout(max(deadline_s - time.monotonic(), 0.01))
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    connection = Connection(sock)
    try:
        nonce = secrets.token_bytes(NONCE)
        connection.send(nonce)
        proof, theirs, said = msgspec.msgpack.decode(
            connection.receive(), type=tuple[bytes, bytes, bytes]
        )
        if not hmac.compare_digest(proof, prove(secret, nonce, theirs, said)):
            raise EOFError("a wrong secret")
        connection.send(prove(secret, theirs, nonce))
        hello = msgspec.msgpack.decode(said, type=Hello)
    except (OSError, EOFError, msgspec.MsgspecError):
        connection.close()
        return None
    fits = (hello.version, hello.size) == (own.version, own.size)
    if not fits or hello.rank not in range(1, own.size):
        connection.close()
        raise RanksFailedError(
            f"Rank {hello.rank} of {hello.size} runs {hello.version}; expected one of ranks 1 to "
            f"{own.size - 1} of {own.size} with {own.version}."
        )
    connection.trust()
    return connection, hello


def gather(
    listener: socket.socket, secret: bytes, own: Hello, within_s: float, check: Callable[[], None]
) -> dict[int, Connection]:
    """A connection to every other rank.

    Args:
        listener: where they come.
        secret: that they know.
        own: rank 0's.
        within_s: seconds that they may take.
        check: called about every second; may raise.

    Raises:
        RanksFailedError: some did not come, or two are the same one; and as of `accept`.
    """
    deadline_s, ranks = time.monotonic() + within_s, dict[int, Connection]()
    try:
        while len(ranks) < own.size - 1:
            came = accept(listener, secret, own, min(time.monotonic() + 1.0, deadline_s))
            if came is not None:
                _add(ranks, *came)
            check()
            if time.monotonic() > deadline_s:
                missing = sorted(set(range(1, own.size)) - set(ranks))
                address, port = listener.getsockname()
                raise RanksFailedError(
                    f"Ranks {missing} did not come to {address} port {port} within {within_s:g} "
                    "seconds; start them too."
                )
    except BaseException:  # Ctrl-C too: ranks that came would wait
        for connection in ranks.values():
            connection.close()
        raise
    return ranks


def _add(ranks: dict[int, Connection], connection: Connection, hello: Hello) -> None:
    """Take a rank in; RanksFailedError where it is there already, and has not ended."""
    before = ranks.get(hello.rank)
    if before is not None and not before.is_closed:
        connection.close()
        raise RanksFailedError(
            f"Two processes are rank {hello.rank} (process {hello.pid} came last); give each its "
            "own rank."
        )
    if before is not None:  # it was started again
        before.close()
    ranks[hello.rank] = connection


def connect(address: tuple[str, int], secret: bytes, own: Hello, deadline_s: float) -> Connection:
    """The connection of another rank to rank 0, tried until the deadline.

    Raises:
        RanksFailedError: rank 0 is not there, or has another secret.
    """
    problem: BaseException = TimeoutError()
    while time.monotonic() < deadline_s:
        try:
            connection = Connection(socket.create_connection(address, timeout=HANDSHAKE_S))
        except OSError as error:
            problem = error
            time.sleep(RETRY_S)
            continue
        try:
            nonce, mine = connection.receive(), secrets.token_bytes(NONCE)
            said = msgspec.msgpack.encode(own)
            connection.send(msgspec.msgpack.encode((prove(secret, nonce, mine, said), mine, said)))
            if not hmac.compare_digest(connection.receive(), prove(secret, mine, nonce)):
                raise EOFError("a wrong secret")
        except TimeoutError as error:  # rank 0 hears another connection first
            connection.close()
            problem = error
            continue
        except (OSError, EOFError) as error:
            connection.close()
            raise RanksFailedError(
                f"Rank 0 at {address[0]} port {address[1]} did not take this rank: {error}. All "
                "ranks need the same secret and version."
            ) from None
        connection.trust()
        return connection
    raise RanksFailedError(f"Rank 0 is not at {address[0]} port {address[1]}: {problem}.")


def prove(secret: bytes, *parts: bytes) -> bytes:
    """The proof that these were sent with knowledge of the secret."""
    return hmac.digest(secret, b"".join(parts), "sha256")


class Messages:
    """A union of message types as frames.

    Args:
        kinds: of one direction, each with a tag.
    """

    def __init__(self, kinds: Sequence[type]) -> None:
        union: Any = kinds[0]
        for kind in kinds[1:]:
            union = union | kind
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)
        self.encode = msgspec.msgpack.Encoder().encode

    def decode(self, frame: bytes) -> Any:
        """The message of a frame; msgspec.MsgspecError where it is none."""
        return self._decoder.decode(frame)
