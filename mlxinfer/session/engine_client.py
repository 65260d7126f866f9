"""Requests to one engine and their events back, for threads and for asyncio. Knows no text.

A caller that leaves early, by an error, Ctrl-C or a closed generator, ends its requests. It does so
by one call in C, which a signal handler cannot interrupt before it has taken effect.
"""

import asyncio
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..core import FinishReason, TokenEvent
from ..errors import EngineClosedError
from ..outputs import Delta, Result
from .output_processor import OutputProcessor

if TYPE_CHECKING:
    from ..engine.engine import Engine, Listener
    from ..engine.loop import EngineLimits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """What one event added to the output of one request."""

    index: int  # of the request within its group
    delta: Delta
    event: TokenEvent


class RequestGroup:
    """Requests that are submitted together, read together and left together.

    It is the one place that aborts a request when its text has ended it, and that drops the events
    that come after a request's end.

    Args:
        engine: runs them.
        outputs: of the requests, in the order of the indices.

    Attributes:
        outputs: as given.
        close: ends the requests that have not ended. A call in C; may be called at any time, twice
            as well.
    """

    def __init__(self, engine: "Engine", outputs: Sequence[OutputProcessor]) -> None:
        self.outputs = outputs
        self._engine = engine
        self._unfinished = {output.request.id: i for i, output in enumerate(outputs)}
        self._held: dict[int, list[Step]] = {}  # of outputs that are checked when they are complete
        attempts = [request_id for output in outputs for request_id in output.attempt_ids]
        self.close: Callable[[], None] = engine.aborter(attempts)

    @property
    def finished(self) -> bool:
        """Whether every request has ended."""
        return not self._unfinished

    def submit(self, listener: "Listener") -> None:
        """Hand the requests to the engine; their events go to `listener`, on the engine's thread.

        The logits of a prompt that is only scored are not passed on: they are scored at once.

        Raises:
            As Engine.submit; requests before the one at fault are submitted.
        """
        self._listener = listener
        for output in self.outputs:
            self._engine.submit(output.request, _scoring(output, listener))

    def index_of(self, event: TokenEvent) -> int | None:
        """Index of the request of an event; None: it has ended, and `push` drops the event."""
        return self._unfinished.get(event.request_id)

    def push(self, event: TokenEvent) -> list[Step]:
        """Add an event to the output of its request; nothing, if the request had ended before.

        The steps of an output that is checked when it is complete come all at once: no client sees
        an answer that is then tried again.

        Raises:
            RequestFailedError: the request failed.
            GrammarFailedError: no attempt at the answer passed its check.
        """
        index = self.index_of(event)
        if index is None:
            return []
        output = self.outputs[index]
        delta = output.push(event)
        steps = [Step(index, delta, event)]
        if output.result is not None:
            del self._unfinished[event.request_id]
            if output.ended_early:
                self._engine.abort(event.request_id)
        if output.unenforced:
            return self._checked(index, steps)
        return steps

    def _checked(self, index: int, steps: list[Step]) -> list[Step]:
        """The steps of an output once it has passed its check; until then they are held."""
        output = self.outputs[index]
        held = self._held.setdefault(index, [])
        held += steps
        if output.result is None:
            return []
        del self._held[index]
        if not output.try_again():
            return held
        self._unfinished[output.request.id] = index
        self._engine.submit(output.request, _scoring(output, self._listener))
        return []


class EngineClient:
    """Submits requests to one engine and reads their events, for threads and for asyncio.

    Args:
        engine: as far as it is used here, it may be called from any thread.
    """

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox[Any]]
        self._mailboxes = weakref.WeakKeyDictionary()

    @property
    def limits(self) -> "EngineLimits":
        """What requests must fit into; a new value after each restart of the engine's loop."""
        return self.engine.limits

    def group(self, outputs: Sequence[OutputProcessor]) -> RequestGroup:
        """Requests to be submitted together."""
        return RequestGroup(self.engine, outputs)

    def run(
        self,
        outputs: Sequence[OutputProcessor],
        watch: Callable[[Result], None] | None = None,
    ) -> list[Result]:
        """Run requests together to their ends; if one fails, all end and its error is raised.

        Args:
            outputs: of the requests.
            watch: is called with each result as its request ends.

        Raises:
            RequestFailedError: one failed.
            EngineClosedError: the engine was closed before all had ended.
        """
        results: list[Result | None] = [None] * len(outputs)
        for step in self._steps(outputs):
            results[step.index] = result = step.delta.result
            if result is not None and watch is not None:
                watch(result)
        return [finished(result) for result in results]

    def stream(self, output: OutputProcessor, *, owner: object = None) -> Iterator[Delta]:
        """The deltas of one request; the last one has its result.

        Args:
            output: of the request.
            owner: is referred to until the stream ends, so that its model stays as long.
        """
        for step in self._steps([output]):
            yield step.delta

    def _steps(self, outputs: Sequence[OutputProcessor]) -> Iterator[Step]:
        """Submit requests and yield their steps until each has ended."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        group = self.group(outputs)
        close = group.close
        try:
            group.submit(events.put)
            while not group.finished:
                self.engine.require_process()
                yield from group.push(events.get())
        except BaseException:  # the caller leaves: an error, Ctrl-C, a closed generator
            close()
            raise

    async def arun(self, output: OutputProcessor) -> Result:
        """`run` of one request for asyncio; cancelling the task ends the request."""
        return await last(self.astream(output))

    async def astream(self, output: OutputProcessor) -> AsyncGenerator[Delta, None]:
        """`stream` for asyncio."""
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        group = self.group([output])
        try:
            group.submit(self.posting_to(events))
            while not group.finished:
                for step in group.push(await events.get()):
                    yield step.delta
        except BaseException:  # as above; or a cancelled task
            group.close()
            raise

    def posting_to(self, inbox: "asyncio.Queue[Any]") -> "Listener":
        """A listener that puts events into a queue of the running event loop.

        A request ends once that loop is closed.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, Mailbox(loop))

        def post(event: TokenEvent) -> None:
            if not mailbox.post(inbox, event):
                self.engine.abort(event.request_id)

        return post


class Mailbox(Generic[T]):
    """Passes messages of other threads to the queues of one event loop.

    A wake-up of the loop costs a system call; messages posted before the loop has run share one.

    Args:
        loop: not kept alive by the mailbox.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._posted: deque[tuple[asyncio.Queue[T], T]] = deque()

    def post(self, target: "asyncio.Queue[T]", message: T) -> bool:
        """Deliver `message` to `target`, from any thread.

        Returns:
            False where the loop is closed: the message cannot be read any more.
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


async def last(deltas: AsyncIterator[Delta]) -> Result:
    """The result that a stream ends with; raises as `finished`."""
    result = None
    async for delta in deltas:
        result = delta.result
    return finished(result)


def finished(result: Result | None) -> Result:
    """The result of a request that has ended.

    Raises:
        EngineClosedError: the engine was closed before the request had ended.
    """
    assert result is not None
    if result.finish_reason is FinishReason.ABORT:
        raise EngineClosedError("The engine was closed.")
    return result


def _scoring(output: OutputProcessor, listener: "Listener") -> "Listener":
    scores = output.prompt_scores
    if scores is None:
        return listener

    def score(event: TokenEvent) -> None:
        if event.prompt_logits is not None:
            scores.push(event.prompt_logits)
        else:
            listener(event)

    return score
