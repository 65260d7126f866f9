"""Control connections between rank 0 and the others: frames of bytes, and who may connect.

Both sides first prove that they know a shared secret: each answers the other's random number with
an HMAC of both numbers. Later frames are not encrypted. Links are private networks, and public
addresses are refused (hosts.py). Rank 0 meets all connections at once, so a stranger that says
nothing holds up no rank. After the proofs it answers whether the rank belongs to its group, and if
not, why.
"""

import contextlib
import hmac
import logging
import math
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from ..errors import RanksFailedError

NONCE = 32  # bytes
MAX_FRAME = 1 << 28  # bytes
MAX_UNPROVEN = 1 << 12  # bytes of a frame, before the other side has proved itself
MAX_STRANGERS = 64  # connections that prove themselves at once; the oldest gives way
HANDSHAKE_S = 10.0  # that a connection may take to prove itself, all in all
RETRY_S = 0.2
POLL_S = 0.05
RANK_0, OTHER = b"rank 0", b"another rank"  # which side a proof is of
log = logging.getLogger("mlxinfer.ranks")


class Connection:
    """One control connection: whole frames in both directions."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._deadline_s = time.monotonic() + HANDSHAKE_S
        self._max_frame = MAX_UNPROVEN

    def send(self, frame: bytes) -> None:
        """Send a frame; raises OSError if the other side has left."""
        self._socket.sendall(struct.pack("<I", len(frame)) + frame)

    def receive(self) -> bytes:
        """The next frame; raises EOFError or OSError if the other side has left."""
        (length,) = struct.unpack("<I", self._exactly(4))
        if length > self._max_frame:
            raise EOFError(f"a frame of {length} bytes")
        return self._exactly(length)

    def receive_within(self, seconds: float) -> bytes:
        """The next frame, which must begin within `seconds`.

        Seconds in which this process was suspended do not count. Raises EOFError if no frame comes,
        and as `receive`.
        """
        for _ in range(math.ceil(seconds)):
            if select.select([self._socket], [], [], 1.0)[0]:
                return self.receive()
        raise EOFError(f"it has said nothing for {seconds:g} seconds")

    def close(self) -> None:
        """End it, for both sides and for a thread that waits for a frame."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def is_closed(self) -> bool:
        """Whether the other side has left. Frames that it sent can still be received."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def trust(self) -> None:
        """Allow large and slow frames, because the other side has proved itself."""
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
    """The introduction of a rank."""

    rank: int
    size: int
    version: str
    pid: int
    ring: list[list[str]] = []  # addresses with ports of every rank


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


def gather(
    listener: socket.socket, secret: bytes, this: Hello, within_s: float, check: Callable[[], None]
) -> dict[int, Connection]:
    """A connection to every other rank.

    Args:
        listener: where they come.
        within_s: seconds that they may take.
        check: called several times a second; may raise.

    Raises:
        RanksFailedError: some did not come, two are the same one, or one does not belong here.
    """
    deadline_s, ranks = time.monotonic() + within_s, dict[int, Connection]()
    door = _Door(listener, secret)
    try:
        while len(ranks) < this.size - 1:
            door.let_in()
            while not door.proven.empty():
                _add(ranks, this, *door.proven.get())
            check()
            if time.monotonic() > deadline_s:
                missing = sorted(set(range(1, this.size)) - set(ranks))
                address, port = listener.getsockname()
                raise RanksFailedError(
                    f"Ranks {missing} did not come to {address} port {port} within {within_s:g} "
                    "seconds; start them too."
                )
    except BaseException:  # Ctrl-C too: ranks that came would wait
        for connection in ranks.values():
            connection.close()
        raise
    finally:
        door.close()
    return ranks


class _Door:
    """Connections that prove themselves, each on a thread of its own."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self.proven: queue.SimpleQueue[tuple[Connection, Hello]] = queue.SimpleQueue()
        self._listener = listener
        self._secret = secret
        self._strangers: list[Connection] = []  # not proven, the oldest first
        self._refused: set[str] = set()  # addresses
        listener.settimeout(POLL_S)

    def let_in(self) -> None:
        """Begin to meet the next connection, if one comes within `POLL_S` seconds."""
        try:
            sock, (address, _) = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) == MAX_STRANGERS:
            self._strangers.pop(0).close()
        connection = Connection(sock)
        self._strangers.append(connection)
        threading.Thread(target=self._meet, args=(connection, address), daemon=True).start()

    def _meet(self, connection: Connection, address: str) -> None:
        hello = None
        try:
            hello = _proven(connection, self._secret)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            connection.close()
            if address not in self._refused:
                log.warning("a connection from %s did not prove itself: %s", address, error)
            self._refused.add(address)
        with contextlib.suppress(ValueError):  # it gave way
            self._strangers.remove(connection)
        if hello is not None:  # last: from here on `close` leaves it alone, if it is taken
            self.proven.put((connection, hello))

    def close(self) -> None:
        for connection in list(self._strangers):
            connection.close()
        while not self.proven.empty():
            self.proven.get()[0].close()


def _proven(connection: Connection, secret: bytes) -> Hello:
    """The introduction of the other side, once it has proved that it knows the secret.

    Raises:
        EOFError, OSError, msgspec.MsgspecError: it has not.
    """
    nonce = secrets.token_bytes(NONCE)
    connection.send(nonce)
    proof, theirs, said = msgspec.msgpack.decode(
        connection.receive(), type=tuple[bytes, bytes, bytes]
    )
    if not hmac.compare_digest(proof, prove(secret, OTHER, nonce, theirs, said)):
        connection.send(b"")
        raise EOFError("it has another secret")
    connection.send(prove(secret, RANK_0, theirs, nonce))
    return msgspec.msgpack.decode(said, type=Hello)


def _add(ranks: dict[int, Connection], this: Hello, connection: Connection, hello: Hello) -> None:
    """Take a rank in, and tell it so; raises RanksFailedError if it does not belong here."""
    before = ranks.get(hello.rank)
    problem = _misfit(this, hello)
    if not problem and before is not None and not before.is_closed:
        problem = (
            f"Two processes are rank {hello.rank} (process {hello.pid} came last); give each its "
            "own rank."
        )
    with contextlib.suppress(OSError):  # it has left again, which the group notices
        connection.send(problem.encode())
    if problem:
        connection.close()
        raise RanksFailedError(problem)
    if before is not None:  # it was started again
        before.close()
    connection.trust()
    ranks[hello.rank] = connection


def _misfit(this: Hello, hello: Hello) -> str:
    """Why a rank does not belong to the group of rank 0; empty if it does."""
    peer = f"Rank {hello.rank} of {hello.size}"
    if hello.version != this.version:
        return f"{peer} runs {hello.version}, and rank 0 {this.version}; install the same on all."
    if hello.size != this.size or hello.rank not in range(1, this.size):
        return f"{peer} came; expected one of ranks 1 to {this.size - 1} of {this.size}."
    if hello.ring != this.ring:
        hosts = f"{hello.ring}, than rank 0, {this.ring}"
        return f"{peer} has another host file, {hosts}; copy the same one."
    return ""


def connect(address: tuple[str, int], secret: bytes, this: Hello, deadline_s: float) -> Connection:
    """The connection of another rank to rank 0, tried until the deadline.

    Raises:
        RanksFailedError: rank 0 is not there, has another secret, or no place for this rank.
    """
    problem: BaseException = TimeoutError("it was not tried")
    while time.monotonic() < deadline_s:
        connection = None
        try:
            connection = Connection(socket.create_connection(address, timeout=HANDSHAKE_S))
            refusal = _introduce(connection, secret, this)
        except (OSError, EOFError) as error:  # it is not there yet, or ends just now
            if connection is not None:
                connection.close()
            problem = error
            time.sleep(RETRY_S)
            continue
        if refusal:
            connection.close()
            raise RanksFailedError(
                f"Rank 0 at {address[0]} port {address[1]} did not take this rank: {refusal}"
            )
        connection.trust()
        return connection
    raise RanksFailedError(f"Rank 0 is not at {address[0]} port {address[1]}: {problem}.")


def _introduce(connection: Connection, secret: bytes, this: Hello) -> str:
    """Prove this rank to rank 0, and let it prove itself; why it refuses, or empty."""
    nonce, mine = connection.receive(), secrets.token_bytes(NONCE)
    if len(nonce) != NONCE:
        raise EOFError("another program listens there")
    said = msgspec.msgpack.encode(this)
    proof = prove(secret, OTHER, nonce, mine, said)
    connection.send(msgspec.msgpack.encode((proof, mine, said)))
    if not hmac.compare_digest(connection.receive(), prove(secret, RANK_0, mine, nonce)):
        return "it has another secret. All ranks need the same."
    return connection.receive().decode(errors="replace")


def prove(secret: bytes, *parts: bytes) -> bytes:
    """The proof that these were sent with knowledge of the secret."""
    return hmac.digest(secret, b"".join(parts), "sha256")
