"""Paths of operators: health, metrics, load; models and adapters are loaded and unloaded."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from prometheus_client import CONTENT_TYPE_LATEST

from .. import __version__
from ..errors import InvalidRequestError, MlxinferError, shown
from ..memory import total_memory_bytes
from .call import Call
from .errors import HttpError
from .http import Body, Plain, RequestBody, encode
from .metrics import ServerMetrics
from .service import Health, ServerState
from .slots import ModelSlot

MAX_DRAIN_S = 3600.0
RETRY_S = {Health.LOADING: 5, Health.DRAINING: 30, Health.STUCK: 30, Health.FAILING: 10}


async def health(call: Call) -> Plain:
    """The server lives."""
    return {"status": "ok"}


async def ready(call: Call) -> Body:
    """The models make tokens; 503 while they are loaded, stuck, or about to end."""
    health = Health.DRAINING if call.service.draining else await call.service.readiness.check()
    content = encode({"status": health})
    if health is Health.READY:
        return Body(content)
    return Body(content, 503, headers=[(b"retry-after", str(RETRY_S[health]).encode())])


# -- numbers, for Prometheus and for routers in front of several servers ------------------------


async def metrics(call: Call) -> Body:
    """Numbers for Prometheus, under vLLM's names and mlxinfer's own."""
    families = await call.service.metrics()
    return Body(families.text(), media_type=CONTENT_TYPE_LATEST.encode())


async def loads(call: Call) -> Plain:
    """Requests and KV cache now, as routers poll it; a server is one rank.

    Source of the form: smg, the gateway of SGLang (github.com/lightseekorg/smg,
    `crates/protocols/src/worker.rs`: WorkerLoadResponse, SchedulerLoadSnapshot).
    """
    load = _load(await call.service.metrics())
    return {"timestamp": datetime.now(UTC).isoformat(), "dp_rank_count": 1, "loads": [load]}


async def version(call: Call) -> Plain:
    """The version, as vLLM tells its own."""
    return {"version": __version__}


async def server_info(call: Call) -> Plain:
    """The version and the first model, as routers ask for it."""
    name = call.service.models.names()[0]
    return {"version": __version__, "served_model_name": name, "dp_size": 1}


def _load(metrics: ServerMetrics) -> Plain:
    running = waiting = used = most = 0
    for name, requests in metrics.request_metrics.items():
        stats = metrics.engine_stats.get(name, {})
        running += stats.get("running", requests.num_running)
        waiting += stats.get("waiting", requests.num_waiting)
        for group in stats.get("groups", ())[:1]:  # the one that holds the longest contexts
            used += group["pages_held"] * stats["page_size"]
            most += group["pages"] * stats["page_size"]
    counted = metrics.request_metrics.values()
    prompts = sum(requests.prompt_tokens for requests in counted)
    hit = sum(requests.cached_tokens for requests in counted) / prompts if prompts else 0.0
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,  # of running requests, in the KV cache
        "max_total_num_tokens": most,  # that the KV cache holds
        "token_usage": used / most if most else 0.0,
        "cache_hit_rate": hit,  # of all prompt tokens since the start
    }


# -- what was reused of prompts: of the key that asks ---------------------------------------------


async def list_reuse(call: Call) -> Plain:
    """The last requests of the key that asks, and why their prompts were computed; last first."""
    return {"object": "list", "data": call.service.reuse.of(call.owner)}


async def show_reuse(call: Call) -> Plain:
    """One of these, by the id of its answer or its x-request-id."""
    record = call.service.reuse.find(call.owner, call.path_params["id"])
    if record is None:
        raise HttpError(
            "not_found", "No such request of this key is remembered; /v1/reuse lists the last ones."
        )
    return record


# -- models --------------------------------------------------------------------------------------


class LoadRequest(RequestBody, kw_only=True):
    """A model by name or alias."""

    model: str


class PinRequest(LoadRequest, kw_only=True):
    """A model by name or alias, and whether it is to stay once it is loaded."""

    pinned: bool


class UnloadRequest(LoadRequest, kw_only=True):
    """A model by name or alias, and the time that its running requests get."""

    drain_s: Annotated[float, Meta(ge=0, le=MAX_DRAIN_S)] = 0.0


async def list_states(call: Call) -> Plain:
    """The models with their state, size, requests and time left."""
    service = call.service
    return {
        "models": [model_state(service, slot) for slot in service.models.slots()],
        "memory_reserved_bytes": service.models.held_bytes,
        "memory_limit_bytes": service.models.limit_bytes,
        "draining": service.draining,
    }


async def load_model(call: Call, body: LoadRequest) -> Plain:
    """Load a model and answer when it is loaded; a disconnect does not stop it."""
    call.refuse_while_draining()
    await call.service.models.load(body.model)
    return _state_of(call, body.model)


async def unload_model(call: Call, body: UnloadRequest) -> Plain:
    """Unload a model; 409 if it is still in use after `drain_s`, and then it stays loaded.

    A disconnect while it waits cancels the unload.
    """
    await call.service.models.unload(body.model, body.drain_s)
    return _state_of(call, body.model)


async def pin_model(call: Call, body: PinRequest) -> Plain:
    """Keep a model in memory once it is loaded, or let it be unloaded again."""
    call.service.models.find(body.model).pinned = body.pinned
    return _state_of(call, body.model)


def _state_of(call: Call, name: str) -> Plain:
    return model_state(call.service, call.service.models.find(name))


def model_state(service: ServerState, slot: ModelSlot) -> Plain:
    """One model. Bytes are those that it takes when it is loaded."""
    metrics = service.request_metrics[slot.entry.name]
    return {
        "name": slot.entry.name,
        "aliases": list(slot.entry.aliases),
        "state": slot.state,
        "load_progress": slot.load_progress,  # null: it is not being loaded
        "pinned": slot.pinned,
        "weights_bytes": slot.weights_bytes,
        "kv_bytes": slot.kv_bytes,
        "max_model_len": slot.max_context,
        "calls": slot.users,  # that use it or wait until it is loaded
        "requests_running": metrics.num_running,
        "requests_waiting": metrics.num_waiting,
        "ttl_left_s": slot.ttl_left_s,  # null: it is not unloaded for idleness
        "failure": None if slot.failure is None else str(slot.failure),  # of the last load
        "failures_in_a_row": slot.failures_in_a_row,
        "retry_left_s": slot.retry_left_s,  # until requests may load it again
        "adapter_failures": {name: str(error) for name, error in slot.adapter_failures.items()},
    }


async def dashboard(call: Call) -> Plain:
    """Models with their memory, running requests, the last errors; all but the settings."""
    service = call.service
    now = await service.metrics()
    stats = now.engine_stats
    running = [state for active in service.calls if (state := active.state()) is not None]
    return {
        **await list_states(call),
        "models": [_shown(service, slot, stats.get(slot.entry.name)) for slot in now.slots],
        "requests": sorted(running, key=lambda state: -state["age_s"]),
        "keys": {name: metrics.shown() for name, metrics in service.key_metrics.items()},
        "problems": service.problems.newest(),
        "memory_active_bytes": max((s["active_memory_bytes"] for s in stats.values()), default=0),
        "memory_peak_bytes": max((s["peak_memory_bytes"] for s in stats.values()), default=0),
        "machine_bytes": total_memory_bytes(),
    }


def _shown(service: ServerState, slot: ModelSlot, stats: Mapping[str, Any] | None) -> Plain:
    """A model of the dashboard; `engine` is null where it is not loaded, or does not answer."""
    metrics = service.request_metrics[slot.entry.name]
    counters = ("prompt_tokens", "cached_tokens", "generation_tokens", "finished")
    return {
        "state": model_state(service, slot),
        "source": slot.entry.source,
        "kv_bits": slot.entry.kv.bits,  # of keys, of values; null: as computed
        "counters": {name: getattr(metrics, name) for name in counters},
        "engine": None if stats is None else _engine(slot, stats),
    }


def _engine(slot: ModelSlot, stats: Mapping[str, Any]) -> Plain:
    """Memory and counters of a loaded model's engine. Counters grow from the load on."""
    counters = ("running", "waiting", "steps", "tokens_computed", "preemptions")
    sources = stats.get("speculation", {}).get("sources", {})
    return {
        "kv_used_bytes": stats["kv_bytes_held"],  # of running requests
        "kv_cached_bytes": stats["kv_bytes_cached"],  # prefixes kept for requests to come
        "kv_limit_bytes": sum(g["pages"] * g["page_bytes"] for g in stats["groups"])
        or slot.kv_bytes,
        "disk_bytes": stats.get("disk", {}).get("num_bytes"),  # null: no disk cache
        **{name: stats[name] for name in counters},
        "failed_proposals": {  # source -> why it was switched off, and how often
            name: f"{source['last_error']} ({source['switched_off']} requests)"
            for name, source in sources.items()
            if source["switched_off"]
        },
    }


# -- adapters, as vLLM has them -----------------------------------------------------------------


class LoadAdapterRequest(RequestBody, kw_only=True):
    """A folder with an adapter, and the name that it gets."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None  # null: the default one, or the first
    load_inplace: bool = False  # in place of the adapter that has the name, if one has


class UnloadAdapterRequest(RequestBody, kw_only=True):
    """An adapter by its name."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's number; not needed
    base_model_name: str | None = None  # null: any that has it


async def load_adapter(call: Call, body: LoadAdapterRequest) -> Plain:
    """Load an adapter (LoRA, rsLoRA or DoRA) of a model; requests run on meanwhile."""
    call.refuse_while_draining()
    models = call.service.models
    folder = _allowed(body.lora_path, call.service.config.adapter_folders)
    slot = models.find(body.base_model_name)
    model, before = slot.entry.name, slot.adapters.get(body.lora_name)
    if body.load_inplace and before is not None:
        await models.unload_adapter(model, body.lora_name)
    try:
        await models.load_adapter(model, body.lora_name, folder)
    except MlxinferError as error:
        error.param = "lora_name" if error.param == "name" else error.param
        if body.load_inplace and before is not None:  # the adapter that was to be replaced stays
            await models.load_adapter(model, body.lora_name, before)
        raise
    return {"message": f"The adapter is there: model '{model}:{body.lora_name}'."}


async def unload_adapter(call: Call, body: UnloadAdapterRequest) -> Plain:
    """Let no new request name an adapter; running ones end with it."""
    await call.service.models.unload_adapter(body.base_model_name, body.lora_name)
    return {"message": f"The adapter {body.lora_name!r} is unloaded."}


def _allowed(path: str, folders: tuple[str, ...]) -> Path:
    """The folder of an adapter, links followed; raises where clients may not name it."""
    if not folders:
        raise InvalidRequestError(
            "This server loads adapters at its start only (--adapter NAME=PATH); --adapter-dir "
            "FOLDER lets requests load those in a folder.",
            param="lora_path",
        )
    if "\0" in path:
        raise InvalidRequestError(f"{shown(path)} is no path.", param="lora_path")
    roots = [Path(folder).expanduser().resolve() for folder in folders]
    for root in roots:
        resolved = (root / path).resolve()  # an absolute path stays what it is
        if resolved.is_relative_to(root) and resolved != root:
            return resolved
    raise InvalidRequestError(
        f"{shown(path)} is not in a folder of --adapter-dir, from which alone adapters are loaded.",
        param="lora_path",
    )
