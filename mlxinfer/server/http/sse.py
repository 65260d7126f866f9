"""Server-sent events: their frames, and a watch over clients that stop reading them.

No frame carries an `id:`, and silence is broken by comments: empty data frames and named pings
break clients that parse every event.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
from starlette.types import Message, Send

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def data(value: Any) -> bytes:
    """The frame of an event without a name, as OpenAI's chat and completions send it."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """The frame of a named event, as Anthropic's messages and OpenAI's responses send it."""
    return b"event: " + event.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


class StallWatch:
    """Sends the messages of one stream; ends the connection of a client that stops reading.

    One timer a stream, not one a message. An aborted connection makes `send` return, and the client
    counts as disconnected.

    Args:
        send: of the connection.
        limit_s: seconds that a message may wait to be taken; it may take up to twice as long until
            this is noticed.
        abort: ends the connection without sending what waits.
    """

    def __init__(self, send: Send, limit_s: float, abort: Callable[[], None]) -> None:
        self._send = send
        self._limit_s = limit_s
        self._abort = abort
        self._since_s: float | None = None  # event-loop time at which a message began to wait
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> None:
        """Send one message."""
        self._since_s = asyncio.get_running_loop().time()
        await self._send(message)
        self._since_s = None

    def __enter__(self) -> "StallWatch":
        self._check_later()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def _check(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._since_s is not None and now_s - self._since_s >= self._limit_s:
            self._abort()
        else:
            self._check_later()
