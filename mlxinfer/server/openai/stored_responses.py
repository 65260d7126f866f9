"""Stored responses: GET and DELETE /v1/responses/{id}, its input items, and cancel."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.datastructures import QueryParams

from ...errors import InvalidRequestError
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..errors import NotStoredError, UnsupportedFieldError
from ..http.replies import Body, Reply, json_body
from ..store import ResponseStore, StoredResponse
from .responses_types import InputItem, Response

MAX_PAGE = 100
DEFAULT_PAGE = 20
_TEXT_TYPES = {"assistant": "output_text"}  # of a part, by role


class DeletedResponse(msgspec.Struct, kw_only=True):
    """What was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """Items of a request, newest first unless asked otherwise."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def owner_of(call: Call) -> str:
    """The name of the key that a request came with; "" without keys."""
    return str(call.log.get("key", ""))


def chain_of(call: Call, id: str) -> list[StoredResponse]:
    """A stored response and all before it, the first one first.

    Raises:
        NotStoredError: it, or one before it, is not there.
        UnsupportedFieldError: this server stores nothing.
    """
    found = store_of(call).chain(owner_of(call), id)
    if found is None:
        raise NotStoredError(
            f"There is no stored response {id[:100]!r}, or one before it is gone: it was not "
            "stored, was deleted, or was the oldest.",
            param="previous_response_id",
        )
    return found


def store_of(call: Call) -> ResponseStore:
    """The store of this server; raises UnsupportedFieldError without one."""
    store = call.service.store
    if store is None:
        raise UnsupportedFieldError(
            "This server stores no responses (store = false); send the whole conversation instead.",
            param="previous_response_id",
        )
    return store


def items_of(stored: StoredResponse) -> list[dict[str, Any]]:
    """The items that a stored response adds to a conversation: its input and its output."""
    items: list[dict[str, Any]] = msgspec.json.decode(stored.input)
    response: dict[str, Any] = msgspec.json.decode(stored.response)
    return [*items, *response["output"]]


def listed_items(items: list[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Items of a request as they are stored and listed: each with an id, contents as parts."""
    number = response_id.partition("_")[2]
    return [_listed(item, f"{number}_{place}") for place, item in enumerate(items)]


def _listed(item: InputItem, place: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": item.type, **msgspec.to_builtins(item)}
    plain["id"] = f"{'msg' if item.type == 'message' else 'item'}_in_{place}"
    if item.type == "message" and isinstance(item.content, str):
        kind = _TEXT_TYPES.get(item.role or "", "input_text")
        plain["content"] = [{"type": kind, "text": item.content}]
        plain["status"] = "completed"
    return plain


async def show_response(call: Call, _: None) -> Reply:
    """A stored response."""
    query = _query(call)
    if query.get("stream") == "true":
        raise UnsupportedFieldError(
            "stream is not supported here: no response is generated in the background.",
            param="stream",
        )
    return Body((await call.in_worker(chain_of, call, _id(call)))[-1].response)


async def delete_response(call: Call, _: None) -> Reply:
    """Forget a stored response."""
    if not await call.in_worker(store_of(call).delete, owner_of(call), _id(call)):
        raise NotStoredError(f"There is no stored response {_id(call)[:100]!r}.")
    return json_body(DeletedResponse(id=_id(call)))


async def cancel_response(call: Call, _: None) -> Reply:
    """Refuse: only responses in the background can be cancelled, and there are none."""
    await call.in_worker(chain_of, call, _id(call))
    raise InvalidRequestError(
        "Only a response with background: true can be cancelled, which is not supported here; "
        "hang up to end a request."
    )


async def input_items(call: Call, _: None) -> Reply:
    """The items that a stored response answered, those of the responses before it included."""
    chain = await call.in_worker(chain_of, call, _id(call))
    items = [item for stored in chain[:-1] for item in items_of(stored)]
    items += msgspec.json.decode(chain[-1].input)
    return json_body(_page(items, _query(call)))


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> ItemList:
    limit, order = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidRequestError(f"limit is a number from 1 to {MAX_PAGE}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order is asc or desc.", param="order")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item.get("id") for item in items]
        if after not in ids:
            raise InvalidRequestError("after names no item of this response.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > len(page),
    )


def _id(call: Call) -> str:
    return str(call.path_params["id"])


def _query(call: Call) -> dict[str, str]:
    """The query's fields; of a repeated one the last value."""
    return dict(QueryParams(call.scope["query_string"]))


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/responses/{id}",
        handler=show_response,
        summary="A stored response.",
        answer=Response,
    ),
    Endpoint(
        method="DELETE",
        path="/v1/responses/{id}",
        handler=delete_response,
        summary="Forget a stored response.",
        answer=DeletedResponse,
    ),
    Endpoint(
        method="GET",
        path="/v1/responses/{id}/input_items",
        handler=input_items,
        summary="The items that a stored response answered.",
        answer=ItemList,
    ),
    Endpoint(
        method="POST",
        path="/v1/responses/{id}/cancel",
        handler=cancel_response,
        summary="Refused: nothing is generated in the background.",
    ),
)
