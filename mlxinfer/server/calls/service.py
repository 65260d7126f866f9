"""What all requests of a server share, and the requests that are being answered. Knows no API."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import ShuttingDownError
from ..registry.models import Models
from ..settings import ServerConfig
from ..watch.readiness import Readiness
from ..watch.tally import Tally
from ..watch.vitals import Vitals
from .admission import Admission
from .workers import Workers

POLL_S = 0.02
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
    tallies: dict[str, Tally] = field(init=False)  # by model name
    vitals: Vitals = field(default_factory=Vitals)
    readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.config.max_waiting, self.config.max_waiting_tokens)
        self.workers = Workers(self.config.text_workers)
        self.tallies = {name: Tally() for name in self.models.names()}
        self.readiness = Readiness(self.models, self.vitals, self.config.ready_deadline_s)

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
        self.models.close()
