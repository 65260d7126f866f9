"""Requests to an engine and their answers back, for callers that wait and for asyncio.

Knows no text. Whoever leaves early ends what was asked for.
"""

import asyncio
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from ..core import FinishReason, Request, TokenEvent
from ..errors import EngineClosedError
from .output_processor import OutputProcessor
from .results import Delta, Result

if TYPE_CHECKING:
    from ..engine.engine import Engine


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


class EngineClient:
    """The way to one engine."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._mailboxes: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, Mailbox[TokenEvent]
        ] = weakref.WeakKeyDictionary()

    def run(self, answers: Sequence[OutputProcessor]) -> list[Result]:
        """Run requests together; any failure ends them all and is raised."""
        by_id = {answer.request.id: answer for answer in answers}
        for event in self.events([answer.request for answer in answers]):
            answer = by_id[event.request_id]
            if answer.result is None:
                answer.push(event)
                if answer.stopped:
                    self._engine.abort(event.request_id)
        return [answer.result for answer in answers if answer.result is not None]

    def stream(self, answer: OutputProcessor) -> Iterator[Delta]:
        """What each step adds to an answer."""
        for event in self.events([answer.request]):
            yield answer.push(event)
            if answer.result is not None:
                return

    def events(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        """Submit requests and yield their events until each has ended; leaving early ends them."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        unfinished: set[str] = set()
        try:
            for request in requests:
                unfinished.add(request.id)  # first: Ctrl-C may come between the two
                self._engine.submit(request, events.put)
            while unfinished:
                self._engine.require_process()
                event = events.get()
                if event.finish_reason is not None:
                    unfinished.discard(event.request_id)
                yield event
        finally:
            for request_id in unfinished:
                self._engine.abort(request_id)

    def all_events(self, request: Request) -> list[TokenEvent]:
        """Run one request to its end.

        Raises:
            RequestFailedError: it failed.
            EngineClosedError: the engine was closed meanwhile.
        """
        events = list(self.events([request]))
        if events[-1].error is not None:
            raise events[-1].error
        if events[-1].finish_reason is FinishReason.ABORT:
            raise EngineClosedError("The engine was closed.")
        return events

    async def astream(self, answer: OutputProcessor) -> AsyncGenerator[Delta, None]:
        """`stream` for asyncio."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, Mailbox(loop))
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def post(event: TokenEvent) -> None:
            if not mailbox.post(events, event):
                self._engine.abort(event.request_id)

        self._engine.submit(answer.request, post)
        try:
            while answer.result is None:
                yield answer.push(await events.get())
        finally:
            self._engine.abort(answer.request.id)


async def last(deltas: AsyncIterator[Delta]) -> Result:
    """The result that a stream ends with."""
    result = None
    async for delta in deltas:
        result = delta.result
    assert result is not None
    return result
