"""What gets in: keys, Host, Origin, sizes, content types. Over real sockets."""

import asyncio
import contextlib
import errno
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from live_server import CHAT, LiveServer, chat, wait_until
from raw_http import connect, exchange, post, read_answer, status_of

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server import run
from mlxinfer.server.config import ServerConfig
from mlxinfer.server.keys import ApiKeys

KEY = "sk-secret"


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    keys = ApiKeys.from_plain([KEY, "other"])
    with LiveServer(keys=keys, max_body_bytes=100_000) as server:
        yield server


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_documentation_needs_no_key_but_a_host(locked: LiveServer, path: str) -> None:
    answer = locked.get(path)
    assert answer.status_code == 200
    assert KEY not in answer.text
    assert not {model.name for model in locked.service.models.running()} & set(
        re.findall(r"\w+", answer.text)
    )
    assert locked.get(path, headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Bearer {KEY}")],
        [("authorization", "bearer other")],
        [("x-api-key", KEY)],
        [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)],
    ],
)
def test_a_key_opens(locked: LiveServer, headers: list[tuple[str, str]]) -> None:
    assert locked.get("/v1/models", headers=headers).status_code == 200


def test_the_host_header_cannot_move_the_path(locked: LiveServer) -> None:
    """Checks look at the path that is routed, not at a URL put together from the Host header."""
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost/health?\r\n\r\n"
    assert status_of(exchange(locked, request)) == 403


def test_keys_are_not_kept() -> None:
    assert KEY not in repr(ApiKeys.from_plain([KEY]))
    for bad in ("", "a b", "ü", "a\n"):
        with pytest.raises(InvalidRequestError):
            ApiKeys.from_plain([bad])


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "studio.local", "::"])
def test_others_need_a_key(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="no API key is set"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, insecure=True).host == host
    assert ServerConfig(host=host, keys=ApiKeys.from_plain(["k"])).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_needs_none(host: str) -> None:
    assert ServerConfig(host=host).loopback


def test_several_addresses_share_a_port() -> None:
    with pytest.raises(InvalidRequestError, match=r"192\.168\.1\.5 can be reached"):
        ServerConfig(host=("127.0.0.1", "192.168.1.5"))
    with LiveServer(host=("127.0.0.1", "127.0.0.2")) as server:
        for address in ("127.0.0.1", "127.0.0.2"):
            answer = httpx.get(f"http://{address}:{server.port}/health")
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8080", 200),
        ("10.0.0.1", 403),
        ("", 403),
    ],
)
def test_only_our_own_names_are_answered(server: LiveServer, host: str, status: int) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
    assert status_of(exchange(server, request)) == status


def test_a_page_elsewhere_may_not_ask(server: LiveServer) -> None:
    foreign = {"origin": "https://evil.example"}
    assert server.post(CHAT, chat(), headers=foreign).status_code == 403
    assert server.get("/v1/models", headers=foreign).status_code == 403
    assert server.get("/v1/models", headers={"origin": "null"}).status_code == 403
    own = {"origin": server.url}
    assert server.get("/v1/models", headers=own).status_code == 200
    asking = {**foreign, "access-control-request-method": "POST"}
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


@pytest.mark.parametrize("name", ["origin", "sec-fetch-site", "referer"])
def test_a_body_without_a_type_is_json_but_from_a_page(server: LiveServer, name: str) -> None:
    """LiteLLM sends such to Ollama's API; a page's request without a type asks no leave."""
    body = json.dumps(chat())
    assert server.client.post(CHAT, content=body).status_code == 200
    assert server.client.post(CHAT, content=body, headers={name: server.url}).status_code == 415


def test_a_charset_is_fine_and_an_encoding_is_not(server: LiveServer) -> None:
    body = json.dumps(chat())
    kind = {"content-type": "application/json; charset=utf-8"}
    assert server.client.post(CHAT, content=body, headers=kind).status_code == 200
    packed = {**kind, "content-encoding": "gzip"}
    assert server.client.post(CHAT, content=body, headers=packed).status_code == 415


def test_the_connection_stays_usable_after_an_error(server: LiveServer) -> None:
    with connect(server) as connection:
        for body, status in ((b"{", 400), (json.dumps(chat()).encode(), 200), (b"[]", 400)):
            connection.sendall(post(CHAT, body))
            assert status_of(read_answer(connection)) == status


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


def test_connections_beyond_the_files_of_the_process_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_paths_and_methods_that_are_not_there(server: LiveServer) -> None:
    assert server.get("/v1/audio/speech").status_code == 404
    assert server.post("/v1/audio/speech", {}).json()["error"]["code"] == "not_found"
    assert server.get(CHAT).status_code == 405
    assert server.post("/v1/models", {}).json()["error"]["code"] == "method_not_allowed"
    assert server.get("/v1/models/").status_code == 200
