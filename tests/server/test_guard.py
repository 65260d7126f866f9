"""What gets in: keys, Host, Origin, sizes, content types. Over real sockets."""

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from live_server import CHAT, LiveServer, chat
from raw_http import connect, exchange, post, read_answer, status_of

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server import run
from mlxinfer.server.config import ServerConfig
from mlxinfer.server.errors import HttpError
from mlxinfer.server.guard import check_host
from mlxinfer.server.keys import ApiKeys
from tests.waiting import wait_until

KEY = "sk-secret"


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    keys = ApiKeys.from_plain([KEY, "other"])
    with LiveServer(keys=keys, max_body_bytes=100_000) as server:
        yield server


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
