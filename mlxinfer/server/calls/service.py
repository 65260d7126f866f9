"""What all requests of a server share, and the requests that are being answered. Knows no API."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Scope

from ..errors import ShuttingDownError
from ..registry.models import Models
from ..settings import ServerConfig
from ..watch.readiness import EngineStats, Readiness
from ..watch.request_metrics import RequestMetrics
from .admission import Admission
from .workers import Workers

POLL_S = 0.02
BODY_BYTES = "mlxinfer.body_bytes"  # in the scope of a request whose body was read
LARGE_BODY = 256 << 10  # bytes
ENDING_S = 2.0  # that interrupted calls get to say so


class Running(Protocol):
    """A request that is being answered; the whole of it is in `call.py`."""

    def interrupt(self, error: Exception) -> None:
        """End it with `error`, in whatever state it is."""


@dataclass(slots=True, eq=False)
class Service:
    """Models, limits and running calls. Lives on one event loop."""

    models: Models
    config: ServerConfig
    draining: bool = False
    calls: set[Running] = field(default_factory=set)  # that generate, or are about to
    admission: Admission = field(init=False)
    workers: Workers = field(init=False)
    long_workers: Workers = field(init=False)
    request_metrics: dict[str, RequestMetrics] = field(init=False)  # by model name
    engine_stats: EngineStats = field(default_factory=EngineStats)
    readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.config.max_waiting, self.config.max_waiting_tokens)
        self.workers = Workers(self.config.text_workers)
        self.long_workers = Workers(self.config.long_text_workers)
        self.request_metrics = {name: RequestMetrics() for name in self.models.names()}
        self.readiness = Readiness(self.models, self.engine_stats, self.config.ready_deadline_s)

    def workers_for(self, scope: Scope) -> Workers:
        """Threads for the texts of a request: large bodies have their own, and wait for each other.

        A million characters take about a second to encode, and no thread can be interrupted.
        """
        large = scope.get(BODY_BYTES, 0) > LARGE_BODY
        return self.long_workers if large else self.workers

    async def drain(self) -> None:
        """Admit nothing more, let what runs end within `drain_s`, then end it with an error."""
        self.draining = True
        await self._until_idle(self.config.drain_s)
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
