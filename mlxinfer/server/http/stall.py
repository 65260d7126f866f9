"""Leaves clients that do not read what they are sent. Knows one connection and a clock."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Message, Send


class StallWatch:
    """Sends messages; where one is not taken within `limit_s` the connection is ended.

    One timer a stream, not one a message. What ends the connection makes `send` return, and the
    client counts as gone.

    Args:
        send: of the connection.
        limit_s: seconds that a message may wait, and at most twice as many.
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
        self._look_later()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._look)

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._since_s is not None and now_s - self._since_s >= self._limit_s:
            self._abort()
        else:
            self._look_later()
