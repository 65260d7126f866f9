"""Whether the models get on with their work: proved by a token, never by a flag. Knows no HTTP.

A server whose process lives while its engine hangs is the failure that a load balancer cannot see.
An idle engine has to make one token; one that works has to finish steps.
"""

import asyncio
import itertools
import logging
import time
from enum import StrEnum
from typing import Any

from ...core import FinishReason, Request, SamplingParams, TokenEvent
from ...errors import EngineClosedError, MlxinferError
from ..registry.models import Models
from ..registry.served import ServedModel
from .vitals import Vitals

PROGRESS_STEPS = 3  # so many later one was computed and read: the next two may be under way
POLL_S = 0.02
FRESH_S = 1.0  # that an answer holds: to ask often costs nothing
CANARY_TOKEN = 0
log = logging.getLogger("mlxinfer.server")
_ids = itertools.count()


class Health(StrEnum):
    """What keeps a server from answering."""

    READY = "ready"
    LOADING = "loading"  # what is to be there from the start
    DRAINING = "draining"  # it is about to end
    STUCK = "stuck"  # an engine does nothing
    FAILING = "failing"  # an engine ends requests with errors


class Readiness:
    """Tries the loaded models; loads none.

    Args:
        models: the registry.
        vitals: asks engines.
        deadline_s: for a token, or for steps.
    """

    def __init__(self, models: Models, vitals: Vitals, deadline_s: float) -> None:
        self._models = models
        self._vitals = vitals
        self._deadline_s = deadline_s
        self._trial: asyncio.Task[Health] | None = None
        self._found_s = 0.0

    async def check(self) -> Health:
        """Try all loaded models at once; whoever asks meanwhile gets the same answer."""
        if not self._models.started:
            return Health.LOADING
        stale = self._trial is None or (
            self._trial.done() and time.monotonic() > self._found_s + FRESH_S
        )
        if stale:
            self._trial = asyncio.create_task(self._try_all())
        assert self._trial is not None
        return await asyncio.shield(self._trial)

    async def _try_all(self) -> Health:
        found = await asyncio.gather(*(self._try(model) for model in self._models.running()))
        self._found_s = time.monotonic()
        return next((health for health in found if health is not Health.READY), Health.READY)

    async def _try(self, model: ServedModel) -> Health:
        health = Health.READY
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._prove(model)
        except TimeoutError:
            health = Health.STUCK
        except EngineClosedError:  # of a model that was unloaded just now nothing is expected
            health = Health.FAILING if model in self._models.running() else Health.READY
        except MlxinferError:
            health = Health.FAILING
        if health is not Health.READY:
            log.error("model is %s", health, extra={"model": model.name})
        return health

    async def _prove(self, model: ServedModel) -> None:
        """Wait until it has computed something new."""
        before = await self._vitals.of(model)
        idle = not _works(before)
        sign = asyncio.create_task(sing(model) if idle else asyncio.sleep(2 * self._deadline_s))
        try:
            while not sign.done():
                await asyncio.wait({sign}, timeout=POLL_S)
                now = await self._vitals.of(model)
                steps = now["steps"] - before["steps"]  # less than none: it has started afresh
                if not 0 <= steps < PROGRESS_STEPS or not (idle or _works(now)):
                    return
            sign.result()
        finally:
            sign.cancel()


async def sing(model: ServedModel) -> None:
    """Let a model make one token.

    Raises:
        RequestFailedError: it could not.
        EngineClosedError: it was closed.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[TokenEvent] = loop.create_future()

    def end(event: TokenEvent) -> None:
        if not ended.done():
            ended.set_result(event)

    def deliver(event: TokenEvent) -> None:
        if event.finish_reason is not None and not loop.is_closed():
            loop.call_soon_threadsafe(end, event)

    request = Request(f"canary-{next(_ids)}", [CANARY_TOKEN], SamplingParams(max_tokens=1))
    model.engine.submit(request, deliver)
    try:
        event = await ended
    finally:
        model.engine.abort(request.id)
    if event.error is not None:
        raise event.error
    if event.finish_reason is FinishReason.ABORT:
        raise EngineClosedError("The model was unloaded.")


def _works(stats: dict[str, Any]) -> bool:
    return bool(stats["running"] or stats["waiting"])
