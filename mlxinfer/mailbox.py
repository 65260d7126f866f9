"""Hands what one thread says to an event loop: one wake-up for many messages. Knows no request."""

import asyncio
import threading
import weakref
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Queues of one event loop that another thread fills.

    A wake-up of the loop costs a system call; messages posted before the loop has run share one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # whoever keeps mailboxes by their loops keeps no loops
        self._lock = threading.Lock()
        self._posted: deque[tuple[asyncio.Queue[T], T]] = deque()

    def post(self, target: "asyncio.Queue[T]", message: T) -> bool:
        """Deliver `message` to `target`, from any thread.

        Returns:
            False where the loop is closed: nobody will ever read it.
        """
        loop = self._loop()
        with self._lock:
            first = not self._posted
            self._posted.append((target, message))
        try:
            if loop is None or loop.is_closed():
                raise RuntimeError
            if first:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed, perhaps just now
            self._posted.clear()
            return False
        return True

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, deque()
        for target, message in posted:
            target.put_nowait(message)
