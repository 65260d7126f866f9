"""Which key may ask what: every route, with every kind of key."""

import asyncio
from typing import Any

import pytest
from live_server import CHAT, LiveServer, chat

from mlxinfer.server.app import ROUTES, form_of
from mlxinfer.server.config import ServerConfig
from mlxinfer.server.guard import Guard
from mlxinfer.server.http import Message, Receive, Scope, Send
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.openapi import documentation
from mlxinfer.server.page import files
from mlxinfer.server.page.conversations import ConversationRoutes
from mlxinfer.server.page.library import LibraryRoutes
from mlxinfer.server.page.routes import PageRoutes
from mlxinfer.server.protocol import CONNECTIONS
from mlxinfer.server.routes import Route, RouteTable

NOTHING: Any = None
KEYS = ApiKeys().with_named(
    {"user": {"key": "u"}, "chief": {"key": "c", "admin": True}}, "keys.toml"
)
ALL: tuple[Route, ...] = (
    *ROUTES,
    *documentation(ROUTES),
    *files.ROUTES,
    *PageRoutes().routes(),
    *ConversationRoutes(NOTHING).routes(),
    *LibraryRoutes.routes(object.__new__(LibraryRoutes)),
)
STATUSES = {  # of the access that a route needs: without a key, with a user's, with an admin's
    "anyone": [200, 200, 200],
    "key": [401, 200, 200],
    "admin": [401, 403, 200],
}


def statuses(route: Route, keys: ApiKeys = KEYS) -> list[int]:
    """What requests without a key, with a user's and with an administrator's get."""

    async def answer(found: Route, scope: Scope, receive: Receive, send: Send) -> None:
        assert found is route
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = Guard(answer, ServerConfig(keys=keys), RouteTable(ALL), form_of)
    path = route.path.replace("{name:path}", "a/b").replace("{id}", "x")
    return [asyncio.run(_status(guard, route.method, path, key)) for key in (None, "u", "c")]


async def _status(guard: Guard, method: str, path: str, key: str | None) -> int:
    found: list[int] = []
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    headers += [] if key is None else [(b"x-api-key", key.encode())]
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "state": {CONNECTIONS: ()},
    }

    async def send(message: Message) -> None:
        found.append(message.get("status", 0))

    await guard(scope, NOTHING, send)
    return found[0]


@pytest.mark.parametrize("route", ALL, ids=lambda route: f"{route.method} {route.path}")
def test_each_route_lets_in_the_keys_of_its_access(route: Route) -> None:
    assert statuses(route) == STATUSES[route.access]
    assert statuses(route, ApiKeys()) == [200, 200, 200]


def test_what_others_see_is_for_administrators() -> None:
    """Models, adapters, downloads, and numbers of all keys."""
    admin = {route.path for route in ALL if route.access == "admin"}
    expected = {route.path for route in ALL if route.path.startswith(("/admin/", "/hub/"))}
    expected |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert admin == expected | {"/metrics", "/v1/loads", "/api/pull"}
    shown = {route.path for route in ALL if route.access == "anyone"} - {
        route.path for route in files.ROUTES
    }
    assert shown == {"/health", "/ready", "/docs", "/openapi.json"}


def test_a_user_neither_changes_adapters_nor_unloads_a_model() -> None:
    with LiveServer(keys=KEYS, adapter_folders=("/",)) as server:
        user = {"x-api-key": "u"}
        load = {"lora_name": "a", "lora_path": "/tmp"}
        assert server.post("/v1/load_lora_adapter", load, headers=user).status_code == 403
        assert server.post("/v1/unload_lora_adapter", load, headers=user).status_code == 403
        unload = {"model": "demo", "messages": [], "keep_alive": 0}
        assert server.post("/api/chat", unload, headers=user).status_code == 403
        assert server.post("/api/chat", unload, headers={"x-api-key": "c"}).status_code == 400
        assert server.post(CHAT, chat(max_tokens=1), headers=user).status_code == 200
