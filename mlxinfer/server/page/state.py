"""GET /admin/state: models with their memory, the live batch, what failed; for the dashboard."""

from dataclasses import asdict
from typing import Any

import msgspec

from ...memory import total_memory_bytes
from ..call import Call
from ..models import Slot
from ..ops import ModelState, model_state
from ..service import Service


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


async def state(call: Call) -> Dashboard:
    """Models with their memory, running requests, the last errors; all but the settings."""
    service = call.service
    now = await service.metrics()
    active = [stats["active_memory_bytes"] for stats in now.engine_stats.values()]
    peaks = [stats["peak_memory_bytes"] for stats in now.engine_stats.values()]
    running = [found for each in service.calls if (found := each.state()) is not None]
    return Dashboard(
        models=[_model(service, slot, now.engine_stats.get(slot.entry.name)) for slot in now.slots],
        requests=[RunningRequest(**found) for found in sorted(running, key=lambda r: -r["age_s"])],
        problems=[Problem(**asdict(each)) for each in service.problems.newest()],
        memory_reserved_bytes=service.models.held_bytes,
        memory_limit_bytes=service.models.limit_bytes,
        memory_active_bytes=max(active, default=0),
        memory_peak_bytes=max(peaks, default=0),
        machine_bytes=total_memory_bytes(),
        draining=service.draining,
    )


def _model(service: Service, slot: Slot, stats: Any) -> ShownModel:
    metrics = service.request_metrics[slot.entry.name]
    names = ModelCounters.__struct_fields__
    return ShownModel(
        state=model_state(service, slot),
        source=slot.entry.source,
        kv_bits=slot.entry.kv_bits,
        counters=ModelCounters(**{name: getattr(metrics, name) for name in names}),
        engine=None if stats is None else _engine(slot, stats),
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
