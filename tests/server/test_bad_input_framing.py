"""Bad input: bytes that are no HTTP, or HTTP that two readers would understand differently."""

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator

import pytest
from bad_input import GOOD
from live_server import CHAT, LiveServer, long_chat
from raw_http import connect, exchange, post, read_all, read_answer, status_of

from mlxinfer.server.protocol import READ_BYTES, TimedProtocol
from tests.waiting import wait_until
from tests.watching import note_calls

BODY = json.dumps(GOOD[CHAT]).encode()
LENGTH = f"content-length: {len(BODY)}\r\n".encode()
GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)
LAST = b"0\r\n\r\n"


def get(target: bytes) -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"


def sized(length: bytes) -> bytes:
    return POST + b"content-length: " + length + b"\r\n\r\n"


def coded(coding: bytes, before: bytes = b"") -> bytes:
    return POST + before + b"transfer-encoding: " + coding + b"\r\n\r\n"


CHUNKED = coded(b"chunked")

pytestmark = pytest.mark.usefixtures("whole")


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return f"{len(data):x}".encode() + extension + b"\r\n" + data + b"\r\n"


REFUSED: dict[str, tuple[bytes, int]] = {
    # reading the length and reading the chunks gives different requests
    "length and chunks": (coded(b"chunked", LENGTH) + chunk(BODY) + LAST, 400),
    "chunks and length": (
        POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n" + chunk(BODY) + LAST,
        400,
    ),
    "two lengths": (POST + LENGTH + b"content-length: 3\r\n\r\n" + BODY, 400),
    "a list of lengths": (POST + b"content-length: 3, 5\r\n\r\n" + BODY, 400),
    "a negative length": (sized(b"-1"), 400),
    "a signed length": (sized(b"+5"), 400),
    "a length in hexadecimal": (sized(b"0x5"), 400),
    "a huge length": (sized(b"9" * 19), 413),
    "an endless length": (sized(b"9" * 5000), 400),
    "no length": (POST + b"\r\n" + BODY, 400),
    "chunked twice": (coded(b"chunked, chunked") + LAST, 400),
    "gzip and chunks": (coded(b"gzip, chunked") + LAST, 400),
    "identity": (POST + LENGTH + b"transfer-encoding: identity\r\n\r\n" + BODY, 400),
    "nearly chunked": (coded(b"xchunked") + LAST, 400),
    "a chunk of no number": (CHUNKED + b"zz\r\nabc\r\n" + LAST, 400),
    "a negative chunk": (CHUNKED + b"-5\r\nabc\r\n" + LAST, 400),
    "a chunk beyond all memory": (CHUNKED + b"f" * 30 + b"\r\nabc", 400),
    "a chunk longer than it says": (CHUNKED + b"3\r\nabcdef\r\n" + LAST, 400),
    "a space before the colon": (GET + b"x-a : 1\r\n\r\n", 400),
    "NUL in a header": (GET + b"x-a: \0\r\n\r\n", 400),
    "a bare CR in a header": (GET + b"x-a: a\rb\r\n\r\n", 400),
    "no name of a header": (GET + b": 1\r\n\r\n", 400),
    "a header without a colon": (GET + b"hello\r\n\r\n", 400),
    "no Host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "no Host in 1.0": (b"GET /v1/models HTTP/1.0\r\n\r\n", 403),
    "two Hosts": (GET + b"host: localhost\r\n\r\n", 400),
    "no ASCII in the path": (get(b"/\xff"), 400),
    "no path": (b"GET HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "no version": (b"GET /v1/models\r\nhost: localhost\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", 403),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "all bytes": (bytes(range(256)), 400),
    "a long header": (GET + b"x-a: " + b"a" * 100_000, 400),
    "many headers": (GET + b"x-a: 1\r\n" * 200 + b"\r\n", 431),
    "a proxy's request": (get(b"http://evil.example/v1/models"), 403),
    "a URL with a name in it": (get(b"http://localhost@evil.example/v1/models"), 403),
    "a URL whose host hides": (get(b"http://evil.example%2Fv1/models"), 403),
    "a URL without a host": (get(b"http:///v1/models"), 403),
    "a URL of another scheme": (get(b"ftp://localhost/v1/models"), 404),
    "a URL in a URL": (get(b"http://localhost/http://localhost/v1/models"), 404),
    "a long header that comes whole": (GET + b"x-a: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    "headers that are long together": (
        GET + (b"x-a: " + b"a" * 7000 + b"\r\n") * 10 + b"\r\n",
        431,
    ),
    "a long path that comes whole": (get(b"/v1/models?" + b"a" * 70_000), 431),
    "a body in crumbs": (CHUNKED + chunk(b" ") * 2000 + LAST, 400),
    "a body in crumbs, with a large chunk first": (
        CHUNKED + chunk(b" " * 2000) + chunk(b" ") * 2000 + LAST,
        400,
    ),
    "a tunnel": (b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    "TRACE": (b"TRACE /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
    "NUL in the path": (get(b"/v1/models%00"), 404),
    "bad escapes in the path": (get(b"/v1/models/%zz%ff"), 404),
}


def test_broken_and_ambiguous_http_is_refused(live: LiveServer) -> None:
    for name, (request, status) in REFUSED.items():
        answer = exchange(live, request)
        assert status_of(answer) == status, (name, answer)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head.lower(), name
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, name
        wait_until(live.is_idle)


@pytest.mark.parametrize("name", ["length and chunks", "chunks and length", "two lengths"])
def test_nothing_is_read_behind_an_ambiguous_end(live: LiveServer, name: str) -> None:
    """The second request, which a proxy in between has not seen, is not answered."""
    with connect(live) as connection:
        connection.sendall(REFUSED[name][0] + GET + b"\r\n")
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 ") == 1


TAKEN = {
    "an extension of a chunk": CHUNKED + chunk(BODY, b";a=b") + LAST,
    "trailers, which are not read": CHUNKED + chunk(BODY) + b"0\r\nhost: evil.example\r\n\r\n",
    "chunks of a byte": CHUNKED + b"".join(chunk(bytes([b])) for b in BODY) + LAST,
    "many chunks that are not tiny": CHUNKED + chunk(b" " * 70) * 2000 + chunk(BODY) + LAST,
    "crumbs behind a large chunk": CHUNKED
    + chunk(b" " * 100_000)
    + chunk(b" ") * 1200
    + chunk(BODY)
    + LAST,
    "headers of nearly all the bytes that are read": POST
    + LENGTH
    + b"x-a: "
    + b"a" * 65_000
    + b"\r\n\r\n"
    + BODY,
    "a whole URL": POST.replace(b"/v1", b"http://localhost/v1") + LENGTH + b"\r\n" + BODY,
    "its host instead of the header's": POST.replace(b"/v1", b"HTTP://LOCALHOST:80/v1").replace(
        b"host: localhost", b"host: evil.example"
    )
    + LENGTH
    + b"\r\n"
    + BODY,
}


def test_odd_but_clear_http_is_answered(live: LiveServer) -> None:
    for name, request in TAKEN.items():
        assert status_of(exchange(live, request)) == 200, name


def test_crumbs_are_counted_anew_for_each_request(live: LiveServer) -> None:
    body = b" " * 600 + BODY
    request = CHUNKED + b"".join(chunk(bytes([b])) for b in body) + LAST
    with connect(live) as connection:
        for _ in range(3):
            connection.sendall(request)
            assert status_of(read_answer(connection)) == 200


def test_others_go_on_between_reads(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at once is worked off at once, event by event."""
    sizes = note_calls(monkeypatch, TimedProtocol, "data_received", lambda _, data: len(data))
    assert status_of(exchange(live, post(CHAT, b" " * 2_000_000 + BODY))) == 200
    assert sum(sizes) > 2_000_000
    assert max(sizes) <= READ_BYTES


def test_a_whole_url_is_a_path_with_a_host(live: LiveServer) -> None:
    for target in (b"http://localhost/v1/models", b"https://LOCALHOST/v1/%6dodels?x=http://y"):
        assert status_of(exchange(live, GET.replace(b"/v1/models", target) + b"\r\n")) == 200
    for target in (b"http://localhost", b"http://localhost?x"):  # the page
        answer = exchange(live, GET.replace(b"/v1/models", target) + b"\r\n")
        assert status_of(answer) == 200
        assert b"text/html" in answer


def test_a_client_that_asks_whether_to_go_on_is_told_so(live: LiveServer) -> None:
    with connect(live) as connection:
        connection.sendall(POST + LENGTH + b"expect: 100-continue\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert status_of(read_answer(connection)) == 200


def test_pipelined_requests_are_answered_in_their_order(live: LiveServer) -> None:
    with connect(live) as connection:
        connection.sendall(post(CHAT, BODY) + post(CHAT, b"{") + GET + b"connection: close\r\n\r\n")
        data = read_all(connection)
    answers = data.split(b"HTTP/1.1 ")[1:]
    assert [int(answer[:3]) for answer in answers] == [200, 400, 200]


@pytest.mark.parametrize(
    ("persistence", "ahead"), [("keep-alive", 1), ("close", 60_000), ("keep-alive", 200_000)]
)
def test_hang_ups_behind_bytes_are_seen(live: LiveServer, persistence: str, ahead: int) -> None:
    began = live.stats()["tokens_sampled"]
    body = json.dumps(long_chat()).encode()
    with connect(live) as connection:
        connection.sendall(post(CHAT, body, f"connection: {persistence}"))
        wait_until(lambda: live.stats()["running"] == 1)
        connection.sendall(b"x" * ahead)
        time.sleep(0.02)
    wait_until(live.is_idle)
    assert live.stats()["tokens_sampled"] - began < 1800


def test_half_a_close_is_a_hang_up(live: LiveServer) -> None:
    body = json.dumps(long_chat()).encode()
    with connect(live) as connection:
        connection.sendall(post(CHAT, body))
        wait_until(lambda: live.stats()["running"] == 1)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    wait_until(live.is_idle)


def test_a_body_longer_than_its_length_is_two_requests(live: LiveServer) -> None:
    with connect(live) as connection:
        connection.sendall(post(CHAT, b"{" + BODY + b"\r\n\r\n", length=1))
        data = read_all(connection)  # until it closes: what came second was no HTTP
    assert data.count(b"HTTP/1.1 400 ") == 2


@pytest.fixture(scope="module")
def hasty() -> Iterator[LiveServer]:
    """Its patience is measured by its own clock."""
    with LiveServer(header_timeout_s=100, body_timeout_s=100, max_body_bytes=20_000) as server:
        yield server


SLOW: dict[str, tuple[bytes, bytes, int]] = {  # first bytes, then these at times, the answer
    "a slow request line": (b"GET /v1", b"/", 0),
    "slow headers": (GET, b"x-a: 1\r\n", 0),
    "a slow body": (POST + LENGTH + b"\r\n", b" ", 408),
    "slow chunks": (CHUNKED, chunk(b" "), 408),
    "nothing at all": (b"", b"", 0),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_client_is_disconnected(hasty: LiveServer, name: str) -> None:
    """Bytes that come in time do not make the time longer."""
    first, more, status = SLOW[name]
    with connect(hasty) as connection:
        connection.sendall(first)

        def left() -> bool:
            hasty.move_clock(40)
            with contextlib.suppress(ConnectionError):
                connection.sendall(more)
            return bool(select.select([connection], [], [], 0)[0])

        wait_until(left)
        try:
            answer = read_answer(connection)
        except ConnectionResetError:  # closed before it read the last that came
            answer = b""
    assert (status_of(answer) if answer else 0) == status
    wait_until(hasty.is_idle)
    wait_until(lambda: hasty.connections() <= 1)


BOMBS = {
    "one chunk": CHUNKED + chunk(b" " * 30_000) + LAST,
    "many chunks": CHUNKED + chunk(b" " * 100) * 300 + LAST,
    "as its length says": post(CHAT, b" " * 30_000),
    "as its length says, later": post(CHAT, b"", length=30_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_client_that_sends_too_much_is_told_so(hasty: LiveServer, name: str) -> None:
    assert status_of(exchange(hasty, BOMBS[name])) == 413
    wait_until(hasty.is_idle)
    wait_until(lambda: hasty.connections() <= 1)


def test_broken_http_is_answered_once(hasty: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    for size in (10, 10_000, 300_000):
        answer = exchange(hasty, CHUNKED + chunk(b" " * size) + b"zz\r\n")
        assert status_of(answer) in (400, 413)
        wait_until(lambda: hasty.connections() <= 1)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_client_with_one_connection_too_many_is_told_so() -> None:
    with LiveServer(max_connections=2) as server, contextlib.ExitStack() as open_ones:
        for _ in range(2):
            open_ones.enter_context(connect(server))
        wait_until(lambda: server.connections() == 2)
        head, _, body = exchange(server, GET + b"\r\n").partition(b"\r\n\r\n")
        assert status_of(head) == 503
        assert b"retry-after: 1" in head
        assert b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "overloaded"
        open_ones.close()
        wait_until(lambda: not server.connections())
        server.check_idle()
