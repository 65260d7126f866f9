"""What all requests of a server share: models, bounds on what waits, threads for texts. No API."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from starlette.types import Scope

from ...errors import OverloadedError
from ..errors import ShuttingDownError
from ..registry.models import Models
from ..registry.slots import Entry
from ..settings import ServerConfig
from ..store import ResponseStore
from ..watch.logs import RecentProblems
from ..watch.readiness import EngineStats, Readiness
from ..watch.request_metrics import RequestMetrics

POLL_S = 0.02
BODY_BYTES = "mlxinfer.body_bytes"  # in the scope of a request after its body was read
LARGE_BODY = 256 << 10  # bytes
ENDING_S = 2.0  # that interrupted calls get to say so
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
SMOOTHING = 0.2  # weight of the newest interval between two first tokens

# a name -> its entry in the registry, downloaded; reports (bytes done, bytes in all)
Fetch = Callable[[str, Callable[[tuple[int, int]], None]], Entry]
P = ParamSpec("P")
T = TypeVar("T")


class Admission:
    """A bound on waiting requests and on the tokens of their prompts.

    A request waits from the time it is handed to the engine until its first token. The engine
    itself would queue without end.

    Args:
        max_waiting: requests without a token.
        max_waiting_tokens: of their prompts together; a single longer one is let in when nothing
            else waits.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._max_tokens = max_waiting_tokens
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._interval_s = 1.0  # between two requests that leave the queue, smoothed
        self._left_s = 0.0  # when the last one did

    def enter(self, num_requests: int, num_tokens: int) -> None:
        """Count requests in.

        Raises:
            OverloadedError: the queue is full; it says when to try again.
        """
        tokens = self.num_waiting_tokens + num_tokens
        full = self.num_waiting + num_requests > self._max_waiting or tokens > self._max_tokens
        if full and self.num_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests with {self.num_waiting_tokens} prompt tokens wait "
                "already; try again later.",
                retry_after_s=self.retry_after_s,
            )
        if not self.num_waiting:
            self._left_s = time.monotonic()
        self.num_waiting += num_requests
        self.num_waiting_tokens = tokens

    def leave(self, num_tokens: int) -> None:
        """Count one request out: it has a token, or it ended."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= num_tokens
        assert self.num_waiting >= 0
        assert self.num_waiting_tokens >= 0
        now = time.monotonic()
        self._interval_s += SMOOTHING * (now - self._left_s - self._interval_s)
        self._left_s = now

    @property
    def retry_after_s(self) -> float:
        """Seconds after which about a quarter of the queue should have gone."""
        return min(max(self._interval_s * self.num_waiting / 4, MIN_RETRY_S), MAX_RETRY_S)


class Workers:
    """Runs functions in threads. They limit their own time: a thread cannot be interrupted.

    Args:
        num_threads: that work at once.
        max_waiting: functions that may wait for a thread.
    """

    def __init__(self, num_threads: int, max_waiting: int = 256) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mlxinfer-text")
        self._max_pending = num_threads + max_waiting
        self._pending = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread and return its result.

        Raises:
            OverloadedError: too many wait.
            PanicError: a library panicked.
            whatever else the function raises.
        """
        if self._pending >= self._max_pending:
            raise OverloadedError("Too many prompts wait to be encoded; try again soon.")
        self._pending += 1
        future = self._pool.submit(_guarded, partial(function, *args, **kwargs))
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Cancel the functions that wait; those that run end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class PanicError(Exception):
    """Replaces the exception of a panic in Rust, which is no Exception and would end the server."""


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:  # only what is no Exception is wrapped
        raise
    except BaseException as panic:  # the fault boundary of a thread
        raise PanicError(f"{type(panic).__name__}: {panic}") from panic


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


class Running(Protocol):
    """A request that is being answered; the whole of it is in `call.py`."""

    def interrupt(self, error: Exception) -> None:
        """End it with `error`, in whatever state it is."""


@dataclass(slots=True, eq=False)
class Service:
    """Models, limits and running calls. Lives on one event loop."""

    models: Models
    config: ServerConfig
    store: ResponseStore | None = None  # None: responses are not stored
    fetch: Fetch | None = None  # None: requests download no models
    draining: bool = False
    hurried: bool = False
    calls: set[Running] = field(default_factory=set)  # that generate, or are about to
    admission: Admission = field(init=False)
    workers: Workers = field(init=False)
    long_workers: Workers = field(init=False)
    request_metrics: dict[str, RequestMetrics] = field(init=False)  # by model name
    engine_stats: EngineStats = field(default_factory=EngineStats)
    readiness: Readiness = field(init=False)
    problems: RecentProblems = field(default_factory=RecentProblems)

    def __post_init__(self) -> None:
        self.admission = Admission(self.config.max_waiting, self.config.max_waiting_tokens)
        self.workers = Workers(self.config.text_workers)
        self.long_workers = Workers(self.config.long_text_workers)
        self.request_metrics = {name: RequestMetrics() for name in self.models.names()}
        self.readiness = Readiness(self.models, self.engine_stats, self.config.ready_deadline_s)

    def add_model(self, entry: Entry) -> None:
        """Serve one more model; raises as `Models.add`."""
        self.models.add(entry)
        self.request_metrics.setdefault(
            entry.name, RequestMetrics()
        )  # it may have been here before

    def workers_for(self, scope: Scope) -> Workers:
        """Threads for the texts of a request: large bodies have their own, and wait for each other.

        A million characters take about a second to encode, and no thread can be interrupted.
        """
        large = scope.get(BODY_BYTES, 0) > LARGE_BODY
        return self.long_workers if large else self.workers

    def hurry(self) -> None:
        """End running calls with an error at once, instead of waiting for them as `drain` does."""
        self.hurried = True

    def refuse(self) -> None:
        """Take no new requests from now on, and say so where readiness is asked for."""
        self.draining = True

    async def drain(self) -> None:
        """Refuse new requests; after `drain_s` end the running ones with an error."""
        self.draining = True
        until_s = time.monotonic() + self.config.drain_s
        while self.calls and not self.hurried and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        for call in list(self.calls):
            call.interrupt(ShuttingDownError("The server is shutting down."))
        await self._until_idle(ENDING_S)

    async def _until_idle(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while self.calls and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """End the threads and the models."""
        self.workers.close()
        self.long_workers.close()
        self.models.close()
        if self.store is not None:
            self.store.close()
