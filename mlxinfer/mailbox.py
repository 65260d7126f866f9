"""Hands what one thread says to an event loop: one wake-up for many messages. Knows no request."""

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Queues of one event loop that another thread fills.

    A wake-up of the loop costs a system call; messages posted before the loop has run share one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._posted: deque[tuple[asyncio.Queue[T], T]] = deque()

    def post(self, target: "asyncio.Queue[T]", message: T) -> bool:
        """Deliver `message` to `target`, from any thread.

        Returns:
            False where the loop is closed: nobody will ever read it.
        """
        with self._lock:
            first = not self._posted
            self._posted.append((target, message))
        if not first:
            return True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed
            self._posted.clear()
            return False
        return True

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, deque()
        for target, message in posted:
            target.put_nowait(message)
