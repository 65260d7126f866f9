"""GET /v1/models and /v1/models/{id} for Anthropic's clients, which send a header of their own."""

from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.datastructures import QueryParams

from ...errors import InvalidRequestError
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..http.replies import Reply, json_body
from ..registry.slots import Slot
from .types import ANTHROPIC

VERSION_HEADER = b"anthropic-version"  # sent by every client of Anthropic's API
DEFAULT_LIMIT, MAX_LIMIT = 20, 1000  # models a page


class AnthropicModel(msgspec.Struct, kw_only=True):
    """A model of the server."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None  # of prompt and answer together; null before its first load
    max_tokens: int | None


class AnthropicModelPage(msgspec.Struct, kw_only=True):
    """A page of models in the server's order; its ids are cursors of the pages beside it."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


async def list_models_paged(call: Call, _: None) -> Reply:
    """A page of models, loaded or not."""
    query = QueryParams(call.scope["query_string"])
    cards = [_card(slot) for slot in call.service.models.slots()]
    stages = [value for key, value in query.multi_items() if key in ("lifecycle", "lifecycle[]")]
    return json_body(_page(cards if not stages or "active" in stages else [], query))


async def show_model_card(call: Call, _: None) -> Reply:
    """One model, by name or alias."""
    return json_body(_card(call.service.models.find(call.path_params["name"])))


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=list_models_paged,
        summary="The models that requests may name, a page of them.",
        answer=AnthropicModelPage,
        style=ANTHROPIC,
        if_header=VERSION_HEADER,
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{name:path}",
        handler=show_model_card,
        summary="One model.",
        answer=AnthropicModel,
        style=ANTHROPIC,
        if_header=VERSION_HEADER,
    ),
)


def _card(slot: Slot) -> AnthropicModel:
    created = datetime.fromtimestamp(slot.entry.created_s, UTC)
    return AnthropicModel(
        id=slot.entry.name,
        display_name=slot.entry.name,
        created_at=created.isoformat().replace("+00:00", "Z"),
        max_input_tokens=slot.max_context,
        max_tokens=slot.max_context,
    )


def _page(cards: list[AnthropicModel], query: QueryParams) -> AnthropicModelPage:
    """The page after `after_id` or before `before_id`, of at most `limit` models.

    Raises:
        InvalidRequestError: an unknown model, both cursors, or an invalid limit.
    """
    limit = _limit(query)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequestError("Send after_id or before_id, not both.", param="before_id")
    if before is not None:
        rest = cards[: _place(cards, before, "before_id")]
        data = rest[-limit:]
    else:
        rest = cards if after is None else cards[_place(cards, after, "after_id") + 1 :]
        data = rest[:limit]
    return AnthropicModelPage(
        data=data,
        has_more=len(rest) > limit,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


def _limit(query: QueryParams) -> int:
    text = query.get("limit", str(DEFAULT_LIMIT))
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequestError(
            f"limit is {text[:20]!r}; expected 1 to {MAX_LIMIT}.", param="limit"
        )
    return limit


def _place(cards: list[AnthropicModel], model_id: str, param: str) -> int:
    for index, card in enumerate(cards):
        if card.id == model_id:
            return index
    raise InvalidRequestError(f"{param}: there is no model {model_id[:100]!r}.", param=param)
