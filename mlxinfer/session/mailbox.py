"""Events of the engine's thread on their way to an event loop."""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ..core import TokenEvent


class EventReader(Protocol):
    """Answers that are read on an event loop."""

    abort: Callable[[], None]  # ends their requests

    def receive(self, event: TokenEvent) -> None:
        """Take an event, on the event loop."""


class Mailbox:
    """Passes events of other threads to the answers that one event loop reads.

    A wake-up of the loop costs a system call; events posted before the loop has run share one.

    Args:
        loop: not kept alive by the mailbox.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._posted: deque[tuple[EventReader, TokenEvent]] = deque()

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Mailbox":
        """The mailbox of an event loop; called on the loop."""
        return _mailboxes.setdefault(loop, cls(loop))

    def post(self, target: EventReader, event: TokenEvent) -> None:
        """Let `target` receive an event on the loop; called on any thread.

        If the loop is closed, nobody can read the event, and the target's requests end.
        """
        loop = self._loop()
        with self._lock:
            first = not self._posted
            self._posted.append((target, event))
        try:
            if loop is None or loop.is_closed():
                raise RuntimeError
            if first:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed, perhaps just now
            self._posted.clear()
            target.abort()

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, deque()
        for target, event in posted:
            target.receive(event)


_mailboxes: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]"
_mailboxes = weakref.WeakKeyDictionary()
