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
    state: str  # unloaded, loading, loaded or unloading; of a broken adapter failed
    aliases: list[str]  # other names that requests may use
    parent: str | None = None  # of an adapter: the model that it changes


class ModelList(msgspec.Struct, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


async def list_models(call: Call, _: None) -> Reply:
    """All models and their adapters, loaded or not."""
    slots = call.service.models.slots()
    cards = [card for slot in slots for card in (_card(slot), *_adapter_cards(slot))]
    return json_body(ModelList(data=cards))


async def show_model(call: Call, _: None) -> Reply:
    """One model, by name or alias."""
    slot, adapter = call.service.models.resolve(call.path_params["name"])
    return json_body(_card(slot) if adapter is None else _adapter_card(slot, adapter))


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


def _adapter_cards(slot: Slot) -> list[ModelCard]:
    return [_adapter_card(slot, adapter) for adapter in slot.adapters]


def _adapter_card(slot: Slot, adapter: str) -> ModelCard:
    card = _card(slot)
    card.id, card.parent, card.aliases = f"{card.id}:{adapter}", card.id, [adapter]
    if adapter in slot.adapter_failures:
        card.state = "failed"
    return card


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
