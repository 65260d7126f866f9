"""Whether the loaded models make progress.

Readiness is proved by a token or by finished steps, never by a flag: a process that lives while its
engine hangs is the failure that a load balancer cannot see. An idle engine has to generate one
token; a working one has to finish steps.
"""

import asyncio
import logging
import time
from enum import StrEnum
from typing import Any

from ..errors import EngineClosedError, MlxinferError
from .metrics import EngineStats
from .models import Models
from .served import ServedModel

PROGRESS_STEPS = 3  # two steps may be in flight at the first look: the third was launched after it
POLL_S = 0.02
FRESH_S = 1.0  # that an answer is reused: frequent probes cost nothing
log = logging.getLogger("mlxinfer.server")


class Health(StrEnum):
    """Whether requests would be answered, and what is in the way."""

    READY = "ready"
    LOADING = "loading"  # pinned and preloaded models
    DRAINING = "draining"  # the server is about to end
    STUCK = "stuck"  # an engine makes no progress
    FAILING = "failing"  # an engine ends requests with errors


class Readiness:
    """Checks the loaded models; loads none.

    Args:
        models: of the server.
        engine_stats: reads the engines' step counters.
        deadline_s: seconds in which a model must generate a token or finish steps.
    """

    def __init__(self, models: Models, engine_stats: EngineStats, deadline_s: float) -> None:
        self._models = models
        self._engine_stats = engine_stats
        self._deadline_s = deadline_s
        self._running: asyncio.Task[Health] | None = None
        self._checked_s = 0.0

    async def check(self) -> Health:
        """Check all loaded models at once; concurrent callers share one check."""
        if not self._models.started:
            return Health.LOADING
        stale = self._running is None or (
            self._running.done() and time.monotonic() > self._checked_s + FRESH_S
        )
        if stale:
            self._running = asyncio.create_task(self._check_all())
        assert self._running is not None
        return await asyncio.shield(self._running)

    async def _check_all(self) -> Health:
        found = await asyncio.gather(*(self._check(model) for model in self._models.running()))
        self._checked_s = time.monotonic()
        return next((health for health in found if health is not Health.READY), Health.READY)

    async def _check(self, model: ServedModel) -> Health:
        health = Health.READY
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._progress(model)
        except TimeoutError:
            health = Health.STUCK
        except EngineClosedError:  # a model that was unloaded just now need not answer
            health = Health.FAILING if model in self._models.running() else Health.READY
        except MlxinferError:
            health = Health.FAILING
        if health is not Health.READY:
            log.error("model is %s", health, extra={"model": model.name})
        return health

    async def _progress(self, model: ServedModel) -> None:
        """Wait until the model has computed something new."""
        before = await self._engine_stats.of(model)
        idle = not _is_busy(before)
        work = model.session.canary() if idle else asyncio.sleep(2 * self._deadline_s)
        canary = asyncio.create_task(work)
        try:
            while not canary.done():
                await asyncio.wait({canary}, timeout=POLL_S)
                now = await self._engine_stats.of(model)
                steps = now["steps"] - before["steps"]  # negative: the engine was restarted
                if not 0 <= steps < PROGRESS_STEPS or not (idle or _is_busy(now)):
                    return
            canary.result()
        finally:
            canary.cancel()


def _is_busy(stats: dict[str, Any]) -> bool:
    return bool(stats["running"] or stats["waiting"])
