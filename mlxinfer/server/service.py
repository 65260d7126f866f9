"""The state that all requests of a server share: models, the queue, threads for texts. No API."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .admission import Admission
from .config import ServerConfig
from .errors import ShuttingDownError
from .http import Scope
from .log import RecentProblems
from .metrics import EngineStats, RequestMetrics, ServerMetrics
from .models import Entry, Models
from .readiness import Readiness
from .store import ResponseStore
from .workers import Workers

POLL_S = 0.02
BODY_BYTES = "mlxinfer.body_bytes"  # in the scope of a request after its body was read
LARGE_BODY = 256 << 10  # bytes
ENDING_S = 2.0  # that interrupted calls get to say so

# a name -> its entry, downloaded; reports (bytes done, bytes in all)
Fetch = Callable[[str, Callable[[tuple[int, int]], None]], Entry]


class Running(Protocol):
    """A request that is being answered: a Call."""

    def interrupt(self, error: Exception) -> None:
        """End it with `error`, in whatever state it is."""

    def state(self) -> dict[str, Any] | None:
        """The request for the dashboard; None: nothing is generated yet."""


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
        self.request_metrics.setdefault(entry.name, RequestMetrics())  # it may have been here

    def workers_for(self, scope: Scope) -> Workers:
        """Threads for the texts of a request: large bodies have their own, and wait for each other.

        A million characters take about a second to encode, and no thread can be interrupted.
        """
        large = scope.get(BODY_BYTES, 0) > LARGE_BODY
        return self.long_workers if large else self.workers

    async def metrics(self) -> ServerMetrics:
        """All numbers at this moment; a stuck engine is left out."""
        stats = await self.engine_stats.all(self.models)
        return ServerMetrics(
            self.models.slots(), self.request_metrics, stats, self.models.limit_bytes
        )

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
        until_s = time.monotonic() + ENDING_S
        while self.calls and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """End the threads and the models."""
        self.workers.close()
        self.long_workers.close()
        self.models.close()
        if self.store is not None:
            self.store.close()
