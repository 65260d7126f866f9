"""Workers of a router: addresses, the file, and servers that announce themselves."""

import contextlib
import itertools
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mlxinfer import cluster, http_json
from mlxinfer.cli._commands import cli
from mlxinfer.errors import InvalidRequestError

LOOPBACK = ["127.0.0.1"]
TWO_MODELS = b'{"data": [{"id": "a"}, {"id": "b"}]}'


@contextlib.contextmanager
def answering(parts: Iterable[bytes]) -> Iterator[str]:
    """The address of something that answers each GET with these bytes."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has left
                for part in parts:
                    self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=[0.02], daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def server() -> Iterator[str]:
    """The address of something that lists two models."""
    with answering([TWO_MODELS]) as url:
        yield url


def workers(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["cluster", "workers", *arguments])


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("studio.local:8080", "http://studio.local:8080"),
        ("http://192.168.1.4:8080/", "http://192.168.1.4:8080"),
        ("https://example.com", "https://example.com"),
        ("http://[fd00::1]:8080", "http://[fd00::1]:8080"),
        ("studio:80", "http://studio:80"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert cluster.checked_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "ftp://a", "http://a/path", "http://a:port", "http://8.8.8.8:80", "example.com:80"),
        *("[::1", "http://[studio]:80"),
        *("http://me:secret@studio:80", "http://studio:80?key=1", "http://studio:80/#a"),
        *(
            "a b:80",
            "a\nb:80",
            "*:80",
            "a,b:80",
            "studio:0",
            "a..local",
            "b\u00fccher.local",
            "a" * 300,
        ),
        *("0.0.0.0:80", "[::]:80", "224.0.0.251:80", "http://[fe80::1%en0]:80", "::1"),
        *("134744072:80", "0x08080808:80", "8.8.8.8.:80", "[2001:4860:4860::8888]:80"),
    ],
)
def test_what_is_no_private_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"address"):
        cluster.checked_url(text)


def test_a_server_is_entered_with_its_first_model() -> None:
    servers = [("http://a:1", ("m",)), ("http://b:2", ("m", "n")), ("http://c:3", ())]
    assert cluster.manifest([cluster.Worker(*each) for each in servers]) == {
        "version": 1,
        "workers": [
            {"id": "http://a:1", "url": "http://a:1", "model_id": "m"},
            {"id": "http://b:2", "url": "http://b:2", "model_id": "m"},
            {"id": "http://c:3", "url": "http://c:3"},
        ],
    }


def test_the_file_lists_the_servers_that_answer(server: str, tmp_path: Path) -> None:
    place = tmp_path / "workers.json"
    dead = "127.0.0.1:9"
    seen = workers(server, dead, "-o", str(place))
    assert seen.exit_code == 0, seen.output
    assert [w["url"] for w in json.loads(place.read_text())["workers"]] == [server]
    assert dead in seen.stderr
    assert "--url" not in seen.stderr  # which is an option of other commands
    assert "smg sends a server requests for one model" in seen.stderr
    assert list(tmp_path.iterdir()) == [place]
    seen = workers(server, dead, "--unchecked", "--json")
    assert len(json.loads(seen.stdout)["workers"]) == 2


def test_a_server_named_twice_is_entered_once(server: str) -> None:
    """A router refuses a whole file in which two workers are at one place."""
    names = [server, "127.0.0.1:9", server.removeprefix("http://") + "/", server.upper()]
    assert [each.url for each in cluster.ask(names)] == [server, "http://127.0.0.1:9"]
    assert len(cluster.ask(["http://127.0.0.1", "127.0.0.1:80"])) == 1


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"null", b"\xff", b"[" * 100_000, b"1" * 5000, b'{"data": null}'),
        *(b'{"data": [{}]}', b'{"data": "abc"}', b'{"data": [{"id": {"a": 1}}]}'),
        *(b'{"data": [{"id": NaN}]}', b'{"data": [{"id": "\\u001b[31m"}]}'),
    ],
)
def test_what_lists_no_models_is_left_out(body: bytes) -> None:
    with answering([body]) as url:
        assert cluster.ask([url])[0].problem is not None
        seen = workers(url)
    assert seen.exit_code == 1
    assert "No server answers" in seen.stderr
    assert "\x1b" not in seen.stderr


def test_an_answer_without_end_takes_no_memory_and_no_time(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_json, "MAX_ANSWER", 1 << 20)
    monkeypatch.setattr(cluster, "ANSWER_S", 0.25)
    ended = threading.Event()
    slow = (b" " for _ in iter(lambda: ended.wait(0.02), True))
    with answering(itertools.repeat(b"[" * 65536)) as huge, answering(slow) as drip:
        found = cluster.ask([drip, huge, server])
        ended.set()
    assert [bool(each.problem) for each in found] == [True, True, False]


def test_many_servers_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones take the time of one, and an answer belongs to the server that gave it."""
    monkeypatch.setattr(cluster, "ASKED_AT_ONCE", 4)
    with contextlib.ExitStack() as stack:
        bodies = [b'{"data": [{"id": "m%d"}]}' % number for number in range(12)]
        urls = [stack.enter_context(answering([body])) for body in bodies]
        assert [each.models for each in cluster.ask(urls)] == [(f"m{n}",) for n in range(12)]


def test_a_long_list_of_models_is_cut_in_the_table() -> None:
    body = json.dumps({"data": [{"id": f"m{number}"} for number in range(1000)]}).encode()
    with answering([body]) as url:
        seen = workers(url)
    assert "m7, 992 more" in seen.stderr
    assert json.loads(seen.stdout)["workers"][0]["model_id"] == "m0"


def test_a_file_that_cannot_be_written_is_left_as_it_was(server: str, tmp_path: Path) -> None:
    """Devices and pipes are written to, links stay links, and nothing half is left."""
    pipe, real, link = tmp_path / "pipe", tmp_path / "real.json", tmp_path / "link.json"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        assert workers(server, "-o", str(pipe)).exit_code == 0
        assert json.loads(read.result())["version"] == 1
    assert pipe.is_fifo()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # not by its name: a replacement would be the machine's
    seen = workers(server, "-o", str(full))
    assert seen.exit_code == 1
    assert "No space left" in seen.stderr
    assert stat.S_ISCHR(full.stat().st_mode)
    link.symlink_to(real)
    assert workers(server, "-o", str(link)).exit_code == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["version"] == 1
    seen = workers(server, "-o", str(tmp_path / "none" / "w.json"))
    assert "cannot be written" in seen.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "full", "real.json", "link.json"}


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "Nothing"), (["127.0.0.1:9"], "No server answers")]
)
def test_no_server_is_an_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    seen = CliRunner().invoke(cli, ["cluster", "workers", *arguments])
    assert seen.exit_code != 0
    assert ("No server" if said == "Nothing" else said) in seen.output


@pytest.mark.slow  # announcing and leaving take seconds
def test_an_announced_server_is_found() -> None:
    pytest.importorskip("zeroconf")
    with cluster.advertised("127.0.0.1", 8123, tls=False, interfaces=LOOPBACK):
        assert cluster.discover(1.5, LOOPBACK) == ["http://127.0.0.1:8123"]
    assert cluster.discover(0.3, LOOPBACK) == []
    with cluster.advertised("fd00::5", 8124, tls=False, interfaces=LOOPBACK):
        assert cluster.discover(1.5, LOOPBACK) == ["http://[fd00::5]:8124"]


@pytest.mark.slow  # announcing and leaving take seconds
def test_servers_of_one_host_keep_their_addresses() -> None:
    pytest.importorskip("zeroconf")
    announced = [("127.0.0.1", 8125), ("fd00::5", 8126), ("192.168.7.9", 8127)]
    with contextlib.ExitStack() as stack:
        for host, port in announced:
            stack.enter_context(cluster.advertised(host, port, tls=False, interfaces=LOOPBACK))
        found = cluster.discover(2.0, LOOPBACK)
    assert set(found) == {
        "http://127.0.0.1:8125",
        "http://[fd00::5]:8126",
        "http://192.168.7.9:8127",
    }


@pytest.mark.slow  # announcing and leaving take seconds
def test_announcements_that_lie_are_left_out() -> None:
    """Other schemes, public addresses, and names without an address hold up no server."""
    zeroconf = pytest.importorskip("zeroconf")

    def announced(name: str, address: str, scheme: str) -> Any:
        return zeroconf.ServiceInfo(
            cluster.SERVICE,
            f"{name}.{cluster.SERVICE}",
            port=80,
            parsed_addresses=[address],
            properties={"scheme": scheme},
            server=f"{name}.local.",
        )

    lies = [("a", "8.8.8.8", "http"), ("b", "10.0.0.1", "http://x/#"), ("c", "0.0.0.0", "http")]
    with contextlib.closing(zeroconf.Zeroconf(interfaces=LOOPBACK)) as liar:
        for lie in lies:
            liar.register_service(announced(*lie))
        record = zeroconf.DNSPointer(cluster.SERVICE, 12, 1, 120, f"empty.{cluster.SERVICE}")
        empty = zeroconf.DNSOutgoing(0x8400)
        empty.add_answer_at_time(record, 0)
        with cluster.advertised("127.0.0.1", 8128, tls=False, interfaces=LOOPBACK):
            liar.send(empty)
            assert cluster.discover(1.5, LOOPBACK) == ["http://127.0.0.1:8128"]


@pytest.mark.slow  # announcing and leaving take seconds
def test_announcements_without_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zeroconf")
    monkeypatch.setattr(cluster, "MAX_ANNOUNCED", 2)
    with contextlib.ExitStack() as stack:
        for port in range(8130, 8133):
            stack.enter_context(
                cluster.advertised("127.0.0.1", port, tls=False, interfaces=LOOPBACK)
            )
        assert len(cluster.discover(1.5, LOOPBACK)) == 2


def test_no_network_is_said() -> None:
    def zeroconf(**_: Any) -> None:
        raise RuntimeError("No interfaces to listen on")

    with pytest.raises(InvalidRequestError, match="no network for mDNS: No interfaces"):
        cluster._network(SimpleNamespace(Zeroconf=zeroconf), LOOPBACK)


def test_a_server_that_none_can_reach_is_not_announced() -> None:
    seen = CliRunner().invoke(cli, ["serve", "-m", "demo", "--port", "0", "--advertise"])
    assert seen.exit_code == 2
    assert "--host" in seen.output
