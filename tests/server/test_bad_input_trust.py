"""Bad input: forbidden callers. Other pages, foreign names, wrong keys, bodies of other types."""

import json
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from bad_input import CHAT, GOOD, MESSAGES, error_of, expect_refusal
from live_server import LiveServer, chat
from raw_http import exchange, status_of

from mlxinfer.server.keys import ApiKeys
from tests.waiting import wait_until

KEY = "sk-a-key-of-ours"

pytestmark = pytest.mark.usefixtures("whole")


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with LiveServer(keys=ApiKeys.from_plain([KEY])) as server:
        yield server
        good = server.post(CHAT, chat(), headers={"authorization": f"Bearer {KEY}"})
        assert good.status_code == 200
        wait_until(server.is_idle)


PAGES = [
    "https://evil.example", "null", "http://localhost.evil.example", "file://", "", "*",
    "app://obsidian.md", "chrome-extension://abcdef", "vscode-webview://1a2b3c",
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/detokenize"])
def test_pages_of_other_origins_are_refused(live: LiveServer, path: str) -> None:
    for page in (*PAGES, f"http://127.0.0.1:{live.port + 1}"):
        error = expect_refusal(live, path, GOOD[path], status=403, headers={"origin": page})
        assert page == "" or page not in error["message"]


NAMES = [
    "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "localhost@evil.example",
    "evil.example#localhost", "localhost/health?", "localhost\\evil.example", "localhost:80:80",
    "localhost:port", "localhost,evil.example", "0.0.0.0", "[::]", "2130706433", "0x7f000001",
    "127.1", "[::1", "localhost.", "\xe9", "10.0.0.1", "",
]  # fmt: skip


def test_names_that_are_not_ours(live: LiveServer) -> None:
    """A page with a name that points at this machine (DNS rebinding) sends its own name as Host."""
    for name in NAMES:
        request = b"GET /v1/models HTTP/1.1\r\nhost: " + name.encode("latin-1") + b"\r\n\r\n"
        assert status_of(exchange(live, request)) == 403, name


TYPES = [
    "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x", "application/octet-stream", "application/jsonp",
    "application/json-patch+json", "application/json, text/plain", "*/*", "",
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_bodies_that_a_form_can_send(live: LiveServer, path: str) -> None:
    """What a page may send without asking (no preflight) is never read."""
    body = json.dumps(GOOD[path]).encode()
    for kind in TYPES:
        expect_refusal(live, path, body, status=415, headers={"content-type": kind})


def test_two_content_types(live: LiveServer) -> None:
    body = json.dumps(GOOD[CHAT]).encode()
    for pair in (("application/json", "text/plain"), ("text/plain", "application/json")):
        headers = [("content-type", kind) for kind in pair]
        answer = live.client.post(CHAT, content=body, headers=headers)
        assert answer.status_code == 415
        error_of(answer, CHAT)


def test_compressed_bodies_are_refused(live: LiveServer) -> None:
    for packing in ("gzip", "br", "deflate", "zstd", "gzip, identity", "x"):
        headers = {"content-encoding": packing}
        expect_refusal(live, CHAT, GOOD[CHAT], status=415, headers=headers)


WRONG_KEYS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "a wrong one": [("authorization", "Bearer wrong")],
    "empty": [("authorization", "Bearer")],
    "no scheme": [("authorization", KEY)],
    "another scheme": [("authorization", f"Basic {KEY}")],
    "more than it": [("authorization", f"Bearer {KEY}x")],
    "less than it": [("authorization", f"Bearer {KEY[:-1]}")],
    "in other case": [("authorization", f"Bearer {KEY.upper()}")],
    "with a space in it": [("authorization", f"Bearer {KEY} x")],
    "twice": [("authorization", f"Bearer {KEY}")] * 2,
    "another beside it": [("authorization", f"Bearer {KEY}"), ("x-api-key", "wrong")],
    "nothing beside it": [("authorization", f"Bearer {KEY}"), ("x-api-key", "")],
    "a wrong one of Anthropic's": [("x-api-key", "wrong")],
    "two of Anthropic's": [("x-api-key", KEY), ("x-api-key", "wrong")],
    "as a cookie": [("cookie", f"key={KEY}")],
    "for a proxy": [("proxy-authorization", f"Bearer {KEY}")],
    "endless": [("authorization", f"Bearer {'x' * 20_000}")],
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_wrong_keys_open_nothing(locked: LiveServer, path: str) -> None:
    for name, headers in WRONG_KEYS.items():
        answer = locked.post(path, GOOD[path], headers=headers)
        assert answer.status_code == 401, name
        assert answer.headers["www-authenticate"] == "Bearer"
        assert KEY not in answer.text
        error_of(answer, path)


PATHS = [
    "/V1/models", "/v1//models", "/v1/models/", "/v1/./models", "/v1/x/../models",
    "/v1%2fmodels", "/..;/v1/models", "/v1/models;a=b", "/\\v1\\models", "/admin", "/debug/state",
    "/.env", "/models", "/v1/v1/models", "/metrics/",
]  # fmt: skip


def test_other_spellings_of_a_path_open_nothing(locked: LiveServer) -> None:
    for path in PATHS:
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        assert status_of(exchange(locked, request)) == 401, path


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_methods_that_are_not_there(live: LiveServer, path: str) -> None:
    for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
        answer = live.client.request(method, path)
        assert answer.status_code == 405, method
        error_of(answer, path)


def test_error_answers_are_not_kept(live: LiveServer) -> None:
    answer: httpx.Response = live.post(CHAT, {})
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers
