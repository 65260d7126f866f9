"""What gets in, and what does not: keys, Host, Origin, sizes, content types. Over real sockets."""

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from bad_input import GOOD, MESSAGES, error_of, expect_refusal
from live_server import CHAT, LiveServer, chat
from raw_http import connect, exchange, post, read_answer, status_of

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server import run
from mlxinfer.server.config import ServerConfig
from mlxinfer.server.errors import HttpError
from mlxinfer.server.guard import check_host
from mlxinfer.server.keys import ApiKeys
from tests.waiting import wait_until

KEY = "sk-a-key-of-ours"

pytestmark = pytest.mark.usefixtures("whole")


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    keys = ApiKeys.from_plain([KEY, "other"])
    with LiveServer(keys=keys, max_body_bytes=100_000) as server:
        yield server
        good = server.post(CHAT, chat(), headers={"authorization": f"Bearer {KEY}"})
        assert good.status_code == 200
        wait_until(server.is_idle)


def test_a_key_opens(locked: LiveServer) -> None:
    bearer, anthropics = ("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)
    other = ("authorization", "bearer other")
    for headers in ([bearer], [other], [anthropics], [bearer, anthropics]):
        assert locked.get("/v1/models", headers=headers).status_code == 200, headers


def test_keys_are_not_kept() -> None:
    assert KEY not in repr(ApiKeys.from_plain([KEY]))
    for bad in ("", "a b", "ü", "a\n"):
        with pytest.raises(InvalidRequestError):
            ApiKeys.from_plain([bad])


def test_others_than_this_machine_need_a_key() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "studio.local", "::"):
        with pytest.raises(InvalidRequestError, match="no API key is set"):
            ServerConfig(host=host)
        assert ServerConfig(host=host, insecure=True).host == host
        assert ServerConfig(host=host, keys=ApiKeys.from_plain(["k"])).host == host
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        assert ServerConfig(host=host).loopback


@pytest.mark.parametrize(
    ("host", "reached", "refused"),
    [
        (
            "127.0.0.1",
            ["host.docker.internal"],
            ["studio.local", "docker.internal", "evil.example"],
        ),
        (
            "0.0.0.0",
            ["host.docker.internal", "studio.local"],
            ["studio.local.evil.example", "local"],
        ),
    ],
)
def test_names_by_which_this_machine_is_reached_are_its_own(
    host: str, reached: list[str], refused: list[str]
) -> None:
    """The names of public DNS, which a page can point anywhere, are not."""
    config = ServerConfig(host=host, insecure=True)
    for name in [*reached, socket.gethostname()]:
        check_host({"headers": [(b"host", f"{name}:8080".encode())]}, config)
    for name in refused:
        with pytest.raises(HttpError):
            check_host({"headers": [(b"host", f"{name}:8080".encode())]}, config)


def test_several_addresses_share_a_port() -> None:
    with pytest.raises(InvalidRequestError, match=r"192\.168\.1\.5 can be reached"):
        ServerConfig(host=("127.0.0.1", "192.168.1.5"))
    with LiveServer(host=("127.0.0.1", "127.0.0.2")) as server:
        for address in ("127.0.0.1", "127.0.0.2"):
            answer = httpx.get(f"http://{address}:{server.port}/health")
            assert answer.status_code == 200, answer.text


def test_our_own_names_are_answered(server: LiveServer) -> None:
    for host in ("localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080"):
        request = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
        assert status_of(exchange(server, request)) == 200, host


def test_our_own_page_may_ask_and_another_not_even_whether_it_may(server: LiveServer) -> None:
    assert server.get("/v1/models", headers={"origin": server.url}).status_code == 200
    asking = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert server.client.options(CHAT, headers=asking).status_code == 403


def test_an_allowed_page_gets_cors_headers() -> None:
    page = "https://chat.example"
    with LiveServer(allowed_origins=(page,), allowed_hosts=("box.example",)) as server:
        asking = {"origin": page, "access-control-request-method": "POST"}
        preflight = server.client.options(CHAT, headers=asking)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == page
        assert preflight.headers["access-control-allow-headers"] == "authorization, *"
        answer = server.get("/v1/models", headers={"origin": page, "host": "box.example"})
        assert answer.headers["access-control-allow-origin"] == page


def test_a_body_without_a_type_is_json_but_from_a_page(server: LiveServer) -> None:
    """LiteLLM sends such to Ollama's API; a page's request without a type asks no leave."""
    body = json.dumps(chat())
    kind = {"content-type": "application/json; charset=utf-8"}
    for fine in ({}, kind):
        assert server.client.post(CHAT, content=body, headers=fine).status_code == 200
    for name in ("origin", "sec-fetch-site", "referer"):
        answer = server.client.post(CHAT, content=body, headers={name: server.url})
        assert answer.status_code == 415, name


def test_a_body_that_goes_on_after_its_answer_is_cut_off() -> None:
    with LiveServer(header_timeout_s=0.5, max_body_bytes=100) as server:
        with connect(server) as connection:
            connection.sendall(post(CHAT, b"", length=10_000_000))
            assert status_of(read_answer(connection)) == 413

            def cut_off() -> bool:
                try:
                    connection.sendall(b" ")
                except OSError:
                    return True
                return False

            wait_until(cut_off)
        server.check_idle()


def test_request_ids_come_back(server: LiveServer) -> None:
    answer = server.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    odd = server.get("/v1/models", headers={"x-request-id": "a b"})
    assert len(odd.headers["x-request-id"]) == 24
    assert server.get("/none").headers["x-request-id"]


def test_idle_connections_of_one_client_leave_room_for_others() -> None:
    limits: Any = {"max_connections": 8, "max_connections_per_client": 6}
    with LiveServer(**limits) as server, contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(connect(server)) for _ in range(20)]
        assert idle[0].recv(1) == b""  # closed, the oldest first
        assert server.post(CHAT, chat(max_tokens=1)).status_code == 200
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.1 200"


def test_connections_beyond_the_file_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "max_open_connections", lambda: 4)
    with LiveServer() as server, contextlib.ExitStack() as open_ones:
        several = [open_ones.enter_context(connect(server)) for _ in range(9)]
        for surplus in several[4:]:
            with contextlib.suppress(ConnectionResetError):
                assert surplus.recv(1) == b""
        wait_until(lambda: server.connections() == 4)
        open_ones.close()
        server.check_idle()


def test_a_lack_of_file_descriptors_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    report, loop = run.LoopErrors(), asyncio.new_event_loop()
    for _ in range(1000):
        report(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "too many")})
    report(loop, {"message": "other"})
    loop.close()
    assert [record.message for record in caplog.records if "descriptor" in record.message] == [
        "no file descriptor is left for a new connection; raise `ulimit -n`"
    ]
    assert "other" in caplog.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/detokenize"])
def test_pages_of_other_origins_are_refused(live: LiveServer, path: str) -> None:
    pages = [
        "https://evil.example", "null", "http://localhost.evil.example", "file://", "", "*",
        "app://obsidian.md", "chrome-extension://abcdef", "vscode-webview://1a2b3c",
    ]  # fmt: skip
    for page in (*pages, f"http://127.0.0.1:{live.port + 1}"):
        error = expect_refusal(live, path, GOOD[path], status=403, headers={"origin": page})
        assert page == "" or page not in error["message"]


def test_requests_under_names_that_are_not_ours_are_refused(live: LiveServer) -> None:
    """A page with a name that points at this machine (DNS rebinding) sends its own name as Host."""
    names = [
        "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "localhost@evil.example",
        "evil.example#localhost", "localhost/health?", "localhost\\evil.example", "localhost:80:80",
        "localhost:port", "localhost,evil.example", "0.0.0.0", "[::]", "2130706433", "0x7f000001",
        "127.1", "[::1", "localhost.", "\xe9", "10.0.0.1", "",
    ]  # fmt: skip
    for name in names:
        request = b"GET /v1/models HTTP/1.1\r\nhost: " + name.encode("latin-1") + b"\r\n\r\n"
        assert status_of(exchange(live, request)) == 403, name


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_bodies_that_a_form_can_send_are_refused(live: LiveServer, path: str) -> None:
    """What a page may send without asking (no preflight) is never read."""
    types = [
        "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x", "application/octet-stream", "application/jsonp",
        "application/json-patch+json", "application/json, text/plain", "*/*", "",
    ]  # fmt: skip
    body = json.dumps(GOOD[path]).encode()
    for kind in types:
        expect_refusal(live, path, body, status=415, headers={"content-type": kind})


def test_a_body_of_two_content_types_is_refused(live: LiveServer) -> None:
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


def test_other_spellings_of_a_path_open_nothing(locked: LiveServer) -> None:
    paths = [
        "/V1/models", "/v1//models", "/v1/models/", "/v1/./models", "/v1/x/../models",
        "/v1%2fmodels", "/..;/v1/models", "/v1/models;a=b", "/\\v1\\models", "/admin",
        "/debug/state", "/.env", "/models", "/v1/v1/models", "/metrics/",
    ]  # fmt: skip
    for path in paths:
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        assert status_of(exchange(locked, request)) == 401, path


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_methods_that_are_not_there_are_refused(live: LiveServer, path: str) -> None:
    for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
        answer = live.client.request(method, path)
        assert answer.status_code == 405, method
        error_of(answer, path)


def test_error_answers_are_not_kept(live: LiveServer) -> None:
    answer = live.post(CHAT, {})
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers
