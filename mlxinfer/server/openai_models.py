"""GET /v1/models and /v1/models/{id}."""

from typing import Literal

import msgspec

from .call import Call
from .endpoint import Endpoint
from .replies import Reply, json_body
from .served import ServedModel


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlxinfer"
    max_model_len: int  # tokens of prompt and answer


class ModelList(msgspec.Struct, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


async def list_models(call: Call, _: None) -> Reply:
    """The models that are running."""
    return json_body(ModelList(data=[_card(m) for m in call.service.models.running()]))


async def show_model(call: Call, _: None) -> Reply:
    """One of them."""
    return json_body(_card(call.service.models.find(call.path_params["name"])))


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=list_models,
        summary="The models that requests may name.",
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


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, created=model.created_s, max_model_len=model.max_context)
