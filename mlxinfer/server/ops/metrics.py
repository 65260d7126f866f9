"""GET /metrics: numbers for Prometheus. Knows where they come from, not what they are called."""

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from ...errors import EngineClosedError
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.service import Service
from ..http.replies import Body, Reply
from ..registry.served import ServedModel
from ..watch.exposition import Snapshot

VITALS_S = 1.0  # that an engine has to say its numbers; without them the rest is still told


async def metrics(call: Call, _: None) -> Reply:
    """All numbers of this moment."""
    return Body((await snapshot(call.service)).text(), media_type=CONTENT_TYPE_LATEST.encode())


async def snapshot(service: Service) -> Snapshot:
    """The numbers of a service; a stuck engine is left out."""
    running = service.models.running()
    found = await asyncio.gather(*(_vitals(service, model) for model in running))
    vitals = {m.name: v for m, v in zip(running, found, strict=True) if v is not None}
    models = service.models
    return Snapshot(models.slots(), service.tallies, vitals, models.limit_bytes)


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="Numbers for Prometheus, under vLLM's names and mlxinfer's own.",
    ),
)


async def _vitals(service: Service, model: ServedModel) -> dict[str, Any] | None:
    try:
        async with asyncio.timeout(VITALS_S):
            return await service.vitals.of(model)
    except (TimeoutError, EngineClosedError):
        return None
