"""HTTP bytes to ASGI: uvicorn's protocol, which waits for headers without end otherwise."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...errors import InvalidRequestError
from .reader import Reader
from .styles import OPENAI

ABORT = "mlxinfer.abort"  # in a request's state: ends its connection without sending what waits
CONNECTIONS = "mlxinfer.connections"  # the set of those that are open
READ_BYTES = 32 << 10  # at once: thousands of small events may be in them, and others wait
MAX_AHEAD = 64 << 10  # bytes that a client may send before it has the answer to what it sent


class PatientProtocol(H11Protocol, asyncio.BufferedProtocol):
    """Closes a connection whose request line and headers are not complete after a while.

    It goes on reading while it answers, or it would not notice that a client that has sent more
    than its request hangs up. How many may connect, the guard says, in the words of the API.
    """

    header_timeout_s = 30.0
    conn: Reader
    _buffer = bytearray()
    _header_timer: asyncio.TimerHandle | None = None

    @classmethod
    def with_timeout(cls, header_timeout_s: float) -> "type[PatientProtocol]":
        """The protocol with another patience."""
        return type("PatientProtocol", (cls,), {"header_timeout_s": header_timeout_s})

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        max_header_bytes = self.config.h11_max_incomplete_event_size
        assert max_header_bytes is not None  # running.py says so
        self.conn = Reader(h11.SERVER, max_header_bytes)
        self.app_state = {**self.app_state, ABORT: transport.abort, CONNECTIONS: self.connections}
        self.limit_concurrency = None
        self._wait_for_headers()

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes go; as many as fit are read at once."""
        self._buffer = bytearray(READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Bytes have come; they may complete the headers, or begin the next ones."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
        elif self._header_timer is None and (before is None or before.response_complete):
            self._wait_for_headers()
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            self._listen_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self._stop_waiting()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that is silent; who does not even read what is left is cut off."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape that other errors have; nobody else answers it."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            self.transport.abort()
            return
        body = OPENAI.body(InvalidRequestError(self.conn.refusal or msg))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _listen_on(self) -> None:
        """Read although the next request has to wait: a little of it, and the end."""
        ahead, _ = self.conn.trailing_data
        if len(ahead) > MAX_AHEAD:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _wait_for_headers(self) -> None:
        self._header_timer = self.loop.call_later(
            self.header_timeout_s, self.timeout_keep_alive_handler
        )

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
