"""API keys: files of them, what they let in, and what each has for itself."""

import asyncio
import shutil
import ssl
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from live_server import CHAT, LiveServer, chat
from scripted import ScriptedServer

from mlxinfer.cli.serve import read_toml
from mlxinfer.errors import InvalidRequestError
from mlxinfer.server import keys as keys_module
from mlxinfer.server.app import ROUTES, App
from mlxinfer.server.call import Call
from mlxinfer.server.config import ServerConfig
from mlxinfer.server.http import Message, Route, Scope
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.page import files
from mlxinfer.server.page.library import LibraryRoutes
from mlxinfer.server.page.routes import PageRoutes
from mlxinfer.server.protocol import CONNECTIONS
from mlxinfer.server.run import check_tls

TLS = Path(__file__).parent / "tls"
TABLES: dict[str, Any] = {
    "anna": {"key": "key-of-anna", "admin": True},
    "ben": {"sha256": "0" * 64},
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys_of_a_file_have_names() -> None:
    keys = ApiKeys.from_plain(["plain"]).with_named(TABLES, "keys.toml")
    assert [key.name for key in keys.all] == ["key1", "anna", "ben"]
    assert [key.is_admin for key in keys.all] == [True, True, False]
    anna = keys.key_of([(b"authorization", b"Bearer key-of-anna")])
    assert anna == keys.all[1]
    assert "key-of-anna" not in repr([keys, keys.all])


@pytest.mark.parametrize(
    "tables",
    [
        {"a": 3},
        {"a": {}},
        {"a": {"key": "x", "sha256": "0" * 64}},
        {"a": {"sha256": "xyz"}},
        {"a": {"key": "x y"}},
        {"a": {"key": "x", "tokens": 3}},
        {"a": {"key": "x", "admin": "yes"}},
        {"a": {"key": "x"}, "b": {"key": "x"}},
        {"key1": {"key": "y"}},
    ],
)
def test_mistakes_in_the_file_are_named(tables: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        ApiKeys.from_plain(["plain"]).with_named(tables, "keys.toml")


def test_a_key_of_the_file_administers_only_if_it_says_so() -> None:
    tables = {"user": {"key": "u"}, "chief": {"key": "c", "admin": True}}
    keys = ApiKeys.from_plain(["plain"]).with_named(tables, "keys.toml")
    with ScriptedServer(keys=keys) as server, server.says("Yes."):
        for key, allowed in (("u", 403), ("c", 200), ("plain", 200)):
            assert server.get("/admin/models", headers=bearer(key)).status_code == allowed
            load = server.post("/admin/models/load", {"model": "demo"}, headers=bearer(key))
            assert load.status_code == allowed
            assert server.post(CHAT, chat(), headers=bearer(key)).status_code == 200
        refused = server.get("/admin/state", headers=bearer("u"))
        assert "admin = true" in refused.json()["error"]["message"]
        assert server.get("/admin/models").status_code == 401
    with ScriptedServer() as server:
        assert server.get("/admin/models").status_code == 200


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    path = tmp_path / "keys.toml"
    path.write_text('[anna]\nkey = "a"\n')
    keys = ApiKeys().with_file(path, read_toml)
    with ScriptedServer(keys=keys) as server, server.says("Yes."):

        def status(key: str) -> int:
            return int(server.post(CHAT, chat(), headers=bearer(key)).status_code)

        assert (status("a"), status("b")) == (200, 401)
        path.write_text('[anna]\nkey = "a"\n[ben]\nkey = "b"\nadmin = true\n')
        assert (status("a"), status("b")) == (200, 200)
        assert server.get("/admin/models", headers=bearer("b")).status_code == 200
        for wrong in ("[anna\n", "", '[anna]\nkey = ""\n'):
            path.write_text(wrong)
            assert (status("a"), status("b"), status("c")) == (200, 200, 401)
        path.write_text('[ben]\nkey = "b"\n')
        assert (status("a"), status("b")) == (401, 200)
        path.unlink()
        assert (status("a"), status("b")) == (401, 200)


@pytest.mark.parametrize("shared", [False, True])
def test_no_key_finds_the_prompts_of_another(shared: bool) -> None:
    keys = ApiKeys.from_plain(["a", "b"])
    long = chat("A prompt that is long enough to fill a page or two of the cache. " * 3)
    with LiveServer(keys=keys, share_prefixes=shared) as server:

        def cached(key: str) -> int:
            usage = server.post(CHAT, long, headers=bearer(key)).json()["usage"]
            result: int = usage["prompt_tokens_details"]["cached_tokens"]
            return result

        assert cached("a") == 0
        assert cached("a") > 0
        assert (cached("b") > 0) is shared
        assert cached("b") > 0


def test_answers_to_one_key_are_proposed_to_that_key_alone() -> None:
    always = {"speculate": "ngram", "fixed_proposals": True}
    keys = ApiKeys.from_plain(["first", "second"])
    with LiveServer(keys=keys, engine=always) as server:

        def accepted(key: str) -> tuple[str, int]:
            """The answer, and how many of its tokens were proposed."""
            stats = server.model.session.engine.stats
            before = stats()["speculation"]["accepted"]
            answer = server.post(CHAT, chat("Hello", max_tokens=30), headers=bearer(key)).json()
            text: str = answer["choices"][0]["message"]["content"]
            return text, stats()["speculation"]["accepted"] - before

        text, num_accepted = accepted("first")
        assert accepted("second") == (text, num_accepted)
        again, after = accepted("first")
    assert again == text
    assert after > num_accepted + 5


def test_https_serves_with_the_given_certificate_only(tmp_path: Path) -> None:
    files: dict[str, Any] = {"tls_cert": str(TLS / "cert.pem"), "tls_key": str(TLS / "key.pem")}
    with LiveServer(**files) as server:
        assert server.url.startswith("https://")
        answer = server.post(CHAT, chat(max_tokens=4))
        assert answer.json()["choices"][0]["message"]["content"] == "Hello! I am"
        assert server.events(CHAT, chat(max_tokens=4))[-1] == "[DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")  # the certificate is of no known authority
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
    with pytest.raises(InvalidRequestError, match="go together"):
        ServerConfig(tls_cert="x")
    shutil.copy(TLS / "cert.pem", tmp_path / "both.pem")
    for cert, key in ((files["tls_cert"], str(tmp_path / "both.pem")), ("none.pem", "none.pem")):
        with pytest.raises(InvalidRequestError, match="--tls-cert"):
            check_tls(ServerConfig(tls_cert=cert, tls_key=key))
    check_tls(ServerConfig(**files))
    assert ssl.OPENSSL_VERSION_INFO >= (1, 1, 1)


APPS = ("obsidian", "chrome-extensions", "vscode")
THEIRS = [
    "app://obsidian.md",
    "capacitor://localhost",
    "chrome-extension://abcd",
    "vscode-webview://1a",
]
OTHERS = [
    "app://other.md", "moz-extension://abcdef", "https://evil.example", "null",
    "https://evil.example/vscode-webview://x",
]  # fmt: skip


def test_apps_and_extensions_may_ask_by_name() -> None:
    with ScriptedServer(allowed_apps=APPS) as server, server.says("Yes."):
        for origin in (*THEIRS, *OTHERS):
            answer = server.post(CHAT, chat(), headers={"origin": origin})
            shown = answer.headers.get("access-control-allow-origin")
            allowed = (answer.status_code, shown) == (200, origin)
            assert allowed if origin in THEIRS else answer.status_code == 403, origin
    with pytest.raises(InvalidRequestError, match="obsidian"):
        ServerConfig(allowed_apps=("nosuch",))


NOTHING: Any = object()
KEYS = ApiKeys().with_named(
    {"user": {"key": "u"}, "chief": {"key": "c", "admin": True}}, "keys.toml"
)
ALL: tuple[Route, ...] = (
    *ROUTES,
    *files.ROUTES,
    *PageRoutes(history=NOTHING).routes(),
    *LibraryRoutes.routes(object.__new__(LibraryRoutes)),
)
STATUSES = {  # of the access that a route needs: without a key, with a user's, with an admin's
    "anyone": [200, 200, 200],
    "key": [401, 200, 200],
    "admin": [401, 403, 200],
}


async def served(call: Call) -> dict[str, Any]:
    return {}


def app_with(keys: ApiKeys) -> App:
    """All routes, each with a handler that answers at once."""
    service: Any = SimpleNamespace(config=ServerConfig(keys=keys), calls=set(), key_metrics={})
    without_file = {(route.method, route.path) for route in files.ROUTES}
    routes = [
        replace(route, handler=served, takes_file=False)
        for route in ALL
        if (route.method, route.path) not in without_file
    ]
    return App(service, routes)


async def statuses(app: App, route: Route) -> list[int]:
    """What requests without a key, with a user's and with an administrator's get."""
    path = route.path.replace("{name:path}", "a/b").replace("{id}", "x")
    return [await _status(app, route.method, path, key) for key in (None, "u", "c")]


async def _status(app: App, method: str, path: str, key: str | None) -> int:
    status: list[int] = []
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
        status.append(message.get("status", 0))

    await app(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]  # it says nothing
    return status[0]


async def test_each_route_lets_in_the_keys_of_its_access() -> None:
    locked, open_to_all = app_with(KEYS), app_with(ApiKeys())
    for route in ALL:
        assert await statuses(locked, route) == STATUSES[route.access], route
        assert await statuses(open_to_all, route) == [200, 200, 200], route


def test_what_others_see_is_for_administrators() -> None:
    """Models, adapters, downloads, and numbers of all keys."""
    admin = {route.path for route in ALL if route.access == "admin"}
    expected = {route.path for route in ALL if route.path.startswith(("/admin/", "/hub/"))}
    expected |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    expected |= {"/v1/kv/held", "/v1/kv/entries", "/v1/kv/compute"}
    assert admin == expected | {"/metrics", "/v1/loads", "/api/pull"}
    shown = {route.path for route in ALL if route.access == "anyone"} - {
        route.path for route in files.ROUTES
    }
    assert shown == {"/health", "/v1/health", "/ping", "/ready"}


def test_a_user_does_not_unload_a_model() -> None:
    with LiveServer(keys=KEYS) as server:
        user = {"x-api-key": "u"}
        unload = {"model": "demo", "messages": [], "keep_alive": 0}
        assert server.post("/api/chat", unload, headers=user).status_code == 403
        assert server.post("/api/chat", unload, headers={"x-api-key": "c"}).status_code == 400
        assert server.post(CHAT, chat(max_tokens=1), headers=user).status_code == 200
