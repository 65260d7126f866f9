"""GET /admin/state: models with their memory, the live batch, what failed; for the dashboard."""

import time
from dataclasses import asdict
from typing import Any

import msgspec

from ...memory import total_memory_bytes
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.service import Service
from ..http.replies import Reply, json_body
from ..ops.admin import ModelState, model_state
from ..ops.metrics import snapshot
from ..registry.slots import Slot
from ..watch.request_metrics import RequestMetrics


class EngineState(msgspec.Struct, kw_only=True):
    """Memory and counters of a loaded model's engine. Counters grow from the load on."""

    kv_used_bytes: int  # held by running requests
    kv_cached_bytes: int  # prefixes kept for requests to come
    kv_limit_bytes: int
    disk_bytes: int | None  # prefixes on disk; null: no disk cache
    running: int
    waiting: int
    steps: int
    tokens_computed: int  # by all steps, prompts included
    preemptions: int
    failed_proposals: dict[
        str, str
    ]  # source of proposals -> why it was switched off, and how often


class ModelCounters(msgspec.Struct, kw_only=True):
    """Counters of a model's requests since the server started."""

    prompt_tokens: int
    cached_tokens: int  # of the prompts: found in the prefix cache, not computed again
    generation_tokens: int
    finished: dict[str, int]  # requests by the reason of their end


class ShownModel(msgspec.Struct, kw_only=True):
    """One model."""

    state: ModelState
    source: str
    kv_bits: tuple[int | None, int | None]  # keys, values; null: as computed
    counters: ModelCounters
    engine: EngineState | None  # null: it is not loaded, or does not answer


class RunningRequest(msgspec.Struct, kw_only=True):
    """One request in the batch or before it; no text of it."""

    id: str
    path: str
    key: str | None  # name of the API key
    model: str
    answers: int
    waiting: bool  # without a token: queued, or its prompt is being read
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int | None
    age_s: float


class Problem(msgspec.Struct, kw_only=True):
    """A warning or an error of the log."""

    time_s: float
    level: str
    message: str
    model: str | None
    request_id: str | None


class Dashboard(msgspec.Struct, kw_only=True):
    """The server at this moment."""

    models: list[ShownModel]
    requests: list[RunningRequest]
    problems: list[Problem]  # the newest first
    memory_reserved_bytes: int
    memory_limit_bytes: int
    memory_active_bytes: int  # arrays of MLX now
    memory_peak_bytes: int
    machine_bytes: int
    draining: bool


async def state(call: Call, _: None) -> Reply:
    """Everything that the dashboard shows, but for the settings."""
    service = call.service
    now = await snapshot(service)
    active = [stats["active_memory_bytes"] for stats in now.engine_stats.values()]
    peaks = [stats["peak_memory_bytes"] for stats in now.engine_stats.values()]
    return json_body(
        Dashboard(
            models=[
                _model(service, slot, now.engine_stats.get(slot.entry.name)) for slot in now.slots
            ],
            requests=running_requests(service),
            problems=[Problem(**asdict(each)) for each in service.problems.newest()],
            memory_reserved_bytes=service.models.held_bytes,
            memory_limit_bytes=service.models.limit_bytes,
            memory_active_bytes=max(active, default=0),
            memory_peak_bytes=max(peaks, default=0),
            machine_bytes=total_memory_bytes(),
            draining=service.draining,
        )
    )


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/admin/state",
        handler=state,
        summary="Models with their memory, running requests, the last errors.",
        answer=Dashboard,
    ),
)


def running_requests(service: Service) -> list[RunningRequest]:
    """What generates or waits to, the oldest first."""
    found = [_request(call) for call in service.calls if isinstance(call, Call) if call.generations]
    return sorted(found, key=lambda each: -each.age_s)


def _request(call: Call) -> RunningRequest:
    generations = call.generations
    requests = [answer.request for each in generations for answer in each.answers]
    limits = [request.params.max_tokens for request in requests]
    return RunningRequest(
        id=call.id,
        path=call.scope["path"],
        key=call.log.get("key"),
        model=generations[0].model.name,
        answers=len(requests),
        waiting=all(each.num_waiting == len(each.answers) for each in generations),
        prompt_tokens=len(requests[0].prompt_ids),
        answer_tokens=sum(sum(each.num_tokens) for each in generations),
        max_tokens=None if None in limits else sum(limit or 0 for limit in limits),
        age_s=time.monotonic() - min(request.arrived_s for request in requests),
    )


def _model(service: Service, slot: Slot, stats: Any) -> ShownModel:
    return ShownModel(
        state=model_state(service, slot),
        source=slot.entry.source,
        kv_bits=slot.entry.kv_bits,
        counters=_counters(service.request_metrics[slot.entry.name]),
        engine=None if stats is None else _engine(slot, stats),
    )


def _counters(metrics: RequestMetrics) -> ModelCounters:
    return ModelCounters(
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=metrics.cached_tokens,
        generation_tokens=metrics.generation_tokens,
        finished=metrics.finished,
    )


def _engine(slot: Slot, stats: dict[str, Any]) -> EngineState:
    return EngineState(
        kv_used_bytes=stats["kv_bytes_held"],
        kv_cached_bytes=stats["kv_bytes_cached"],
        kv_limit_bytes=sum(g["pages"] * g["page_bytes"] for g in stats["groups"]) or slot.kv_bytes,
        disk_bytes=stats.get("disk", {}).get("num_bytes"),
        running=stats["running"],
        waiting=stats["waiting"],
        steps=stats["steps"],
        tokens_computed=stats["tokens_computed"],
        preemptions=stats["preemptions"],
        failed_proposals={
            name: f"{source['last_error']} ({source['switched_off']} requests)"
            for name, source in stats.get("speculation", {}).get("sources", {}).items()
            if source["switched_off"]
        },
    )
