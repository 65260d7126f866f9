"""GET /v1/models and /v1/models/{id}."""

from typing import Literal

import msgspec

from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Reply, json_body
from ..registry.slots import Slot


class ModelCard(msgspec.Struct, kw_only=True):
    """A model of the server."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlxinfer"
    max_model_len: int | None  # tokens of prompt and answer; null before its first load
    context_length: int | None  # the same
    capabilities: dict[str, bool] | None  # null before its first load
    state: str  # unloaded, loading, loaded or unloading; a request loads its model
    aliases: list[str]  # other names that requests may use


class ModelList(msgspec.Struct, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


async def list_models(call: Call, _: None) -> Reply:
    """All models, loaded or not."""
    return json_body(ModelList(data=[_card(slot) for slot in call.service.models.slots()]))


async def show_model(call: Call, _: None) -> Reply:
    """One model, by name or alias."""
    return json_body(_card(call.service.models.find(call.path_params["name"])))


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=list_models,
        summary="All models that requests may name.",
        answer=ModelList,
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{name:path}",
        handler=show_model,
        summary="One model.",
        answer=ModelCard,
    ),
)


def _card(slot: Slot) -> ModelCard:
    return ModelCard(
        id=slot.entry.name,
        created=slot.entry.created_s,
        max_model_len=slot.max_context,
        context_length=slot.max_context,
        capabilities=slot.capabilities,
        state=slot.state,
        aliases=list(slot.entry.aliases),
    )
