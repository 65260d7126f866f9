"""/admin/models: list, load and unload models. Behind the same API keys."""

from typing import Annotated

import msgspec
from msgspec import Meta

from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.service import Service
from ..http.replies import Reply, json_body
from ..registry.slots import Slot

MAX_DRAIN_S = 3600.0


class ModelState(msgspec.Struct, kw_only=True):
    """One model. Bytes are what it takes when it is loaded."""

    name: str
    aliases: list[str]
    state: str
    pinned: bool
    weights_bytes: int
    kv_bytes: int
    max_model_len: int | None
    calls: int  # that use it or wait until it is loaded
    requests_running: int
    requests_waiting: int
    ttl_left_s: float | None  # until it is unloaded for idleness; null: never
    failure: str | None  # error of the last load
    failures_in_a_row: int
    retry_left_s: float  # until requests may load it again; 0: now
    adapter_failures: dict[str, str]  # errors of its adapters that are not there, by name


class ServerState(msgspec.Struct, kw_only=True):
    """All models and their shared memory budget."""

    models: list[ModelState]
    memory_reserved_bytes: int
    memory_limit_bytes: int
    draining: bool


class LoadRequest(msgspec.Struct, kw_only=True):
    """A model by name or alias."""

    model: str


class PinRequest(msgspec.Struct, kw_only=True):
    """A model by name or alias, and whether it is to stay once it is loaded."""

    model: str
    pinned: bool


class UnloadRequest(msgspec.Struct, kw_only=True):
    """A model by name or alias, and the time that its running requests get."""

    model: str
    drain_s: Annotated[float, Meta(ge=0, le=MAX_DRAIN_S)] = 0.0


async def list_states(call: Call, _: None) -> Reply:
    """Every model with its state."""
    service = call.service
    return json_body(
        ServerState(
            models=[model_state(service, slot) for slot in service.models.slots()],
            memory_reserved_bytes=service.models.held_bytes,
            memory_limit_bytes=service.models.limit_bytes,
            draining=service.draining,
        )
    )


async def load_model(call: Call, body: LoadRequest) -> Reply:
    """Load a model and answer when it is loaded; a disconnect does not stop it."""
    call.refuse_while_draining()
    await call.service.models.load(body.model)
    return _answer(call, body.model)


async def unload_model(call: Call, body: UnloadRequest) -> Reply:
    """Unload a model; 409 if it is still in use after `drain_s`, and then it stays loaded.

    A disconnect while it waits cancels the unload.
    """
    await call.service.models.unload(body.model, body.drain_s)
    return _answer(call, body.model)


async def pin_model(call: Call, body: PinRequest) -> Reply:
    """Keep a model in memory once it is loaded, or let it be unloaded again."""
    call.service.models.pin(body.model, body.pinned)
    return _answer(call, body.model)


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/admin/models",
        handler=list_states,
        summary="The models with their state, size, requests and time left.",
        answer=ServerState,
    ),
    Endpoint(
        method="POST",
        path="/admin/models/load",
        handler=load_model,
        summary="Load a model.",
        body=LoadRequest,
        answer=ModelState,
    ),
    Endpoint(
        method="POST",
        path="/admin/models/unload",
        handler=unload_model,
        summary="Unload a model.",
        body=UnloadRequest,
        answer=ModelState,
    ),
    Endpoint(
        method="POST",
        path="/admin/models/pin",
        handler=pin_model,
        summary="Pin a model, or no longer.",
        body=PinRequest,
        answer=ModelState,
    ),
)


def _answer(call: Call, name: str) -> Reply:
    return json_body(model_state(call.service, call.service.models.find(name)))


def model_state(service: Service, slot: Slot) -> ModelState:
    """What is known of one model."""
    metrics = service.request_metrics[slot.entry.name]
    return ModelState(
        name=slot.entry.name,
        aliases=list(slot.entry.aliases),
        state=slot.state,
        pinned=slot.pinned,
        weights_bytes=slot.weights_bytes,
        kv_bytes=slot.kv_bytes,
        max_model_len=slot.max_context,
        calls=slot.users,
        requests_running=metrics.num_running,
        requests_waiting=metrics.num_waiting,
        ttl_left_s=service.models.ttl_left_s(slot),
        failure=None if slot.failure is None else str(slot.failure),
        failures_in_a_row=slot.brake.num_failures,
        retry_left_s=service.models.retry_left_s(slot),
        adapter_failures={name: str(error) for name, error in slot.adapter_failures.items()},
    )
