"""HTTP bytes to ASGI: uvicorn's protocol and h11, with limits on slow headers and tiny chunks."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import InvalidRequestError
from .http import OPENAI

MIN_CHUNK_BYTES = 64  # of a body's chunks on average, once there are more than MAX_SMALL_CHUNKS
MAX_SMALL_CHUNKS = 1000
ABORT = "mlxinfer.abort"  # in a request's state: ends its connection without sending what waits
CONNECTIONS = "mlxinfer.connections"  # in a request's state: the set of open connections
READ_BYTES = 32 << 10  # at once: thousands of small events may be in them, and others wait
MAX_AHEAD = 64 << 10  # bytes that a client may send ahead of the answer to its request


class ChunkLimitedConnection(h11.Connection):
    """h11's parser, which also refuses bodies in tiny chunks: each costs as much as a large one.

    `refusal` is the message of such a refusal; None for what is not HTTP at all.
    """

    refusal: str | None = None
    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._count(event)
        return event

    def _count(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        if (
            self._num_chunks > MAX_SMALL_CHUNKS
            and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks
        ):
            self.refusal = (
                f"The first {self._num_chunks} chunks of the body hold {self._num_bytes} bytes; "
                f"expected {MIN_CHUNK_BYTES} in each on average. Send larger chunks, or the body "
                "with a content-length."
            )
            raise h11.RemoteProtocolError(self.refusal)


class TimedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1 protocol, which also closes connections if their headers do not arrive.

    Reading goes on while a request is answered: otherwise a client that pipelines and hangs up
    would not be noticed. The number of connections is limited by guard.py; the answer is in
    the style of the API.
    """

    header_timeout_s = 30.0  # until headers are complete
    max_per_client = 1 << 30  # connections of one address; its oldest idle ones are closed
    max_open = 1 << 30  # connections of all; further ones are closed at once, without an answer
    conn: ChunkLimitedConnection
    _buffer = bytearray()
    _header_timer: asyncio.TimerHandle | None = None
    _opened_s = 0.0  # event-loop time

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        max_header_bytes = self.config.h11_max_incomplete_event_size
        assert max_header_bytes is not None  # set in run.py
        self.conn = ChunkLimitedConnection(h11.SERVER, max_header_bytes)
        self.app_state = {**self.app_state, ABORT: transport.abort, CONNECTIONS: self.connections}
        self.limit_concurrency = None
        self._wait_for_headers()
        self._opened_s = self.loop.time()
        if len(self.connections) > self.max_open:
            transport.abort()
        else:
            self._make_room()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer that the next bytes are read into: a view, since asyncio's TLS slices it."""
        self._buffer = bytearray(READ_BYTES)
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Handle bytes, which may complete the headers or begin the next request's."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
        elif self._header_timer is None and (before is None or before.response_complete):
            self._wait_for_headers()
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            self._listen_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Close a silent connection; abort it if the client does not read what is left."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, in the style of other errors; no handler sees them."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the answer has begun
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

    def _make_room(self) -> None:
        """Close the oldest idle connection of a client that has too many of them.

        Otherwise one client that opens connections and sends nothing would lock out all others.
        """
        if len(self.connections) <= self.max_per_client or self.client is None:
            return
        from_client = [
            connection
            for connection in self.connections
            if isinstance(connection, TimedProtocol) and not connection.transport.is_closing()
            if connection.client is not None and connection.client[0] == self.client[0]
        ]
        idle = [
            connection
            for connection in from_client
            if connection.cycle is None or connection.cycle.response_complete
        ]
        if len(from_client) > self.max_per_client and idle:
            min(idle, key=lambda connection: connection._opened_s).transport.close()

    def _listen_on(self) -> None:
        """Read on while the next request waits: its first bytes, and a disconnect."""
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
