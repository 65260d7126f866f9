"""Workers of a router: addresses, the file, and servers that announce themselves."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlxinfer import cluster
from mlxinfer.cli._commands import cli
from mlxinfer.errors import InvalidRequestError

LOOPBACK = ["127.0.0.1"]


@pytest.fixture
def server() -> Any:
    """The address of something that lists two models."""

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "a"}, {"id": "b"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


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
    ],
)
def test_what_is_no_private_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"address"):
        cluster.checked_url(text)


def test_a_server_of_one_model_is_entered_under_its_name() -> None:
    workers = [cluster.Worker("http://a:1", ("m",)), cluster.Worker("http://b:2", ("m", "n"))]
    assert cluster.manifest(workers) == {
        "version": 1,
        "workers": [
            {"id": "http://a:1", "url": "http://a:1", "model_id": "m"},
            {"id": "http://b:2", "url": "http://b:2"},
        ],
    }


def test_the_file_lists_the_servers_that_answer(server: str, tmp_path: Path) -> None:
    place = tmp_path / "workers.json"
    dead = "127.0.0.1:9"
    seen = CliRunner().invoke(cli, ["cluster", "workers", server, dead, "-o", str(place)])
    assert seen.exit_code == 0, seen.output
    assert [w["url"] for w in json.loads(place.read_text())["workers"]] == [server]
    assert dead in seen.stderr
    assert list(tmp_path.iterdir()) == [place]
    seen = CliRunner().invoke(cli, ["cluster", "workers", server, dead, "--unchecked", "--json"])
    assert len(json.loads(seen.stdout)["workers"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "Nothing"), (["127.0.0.1:9"], "No server answers")]
)
def test_no_server_is_an_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    seen = CliRunner().invoke(cli, ["cluster", "workers", *arguments])
    assert seen.exit_code != 0
    assert ("No server" if said == "Nothing" else said) in seen.output


def test_an_announced_server_is_found() -> None:
    pytest.importorskip("zeroconf")
    with cluster.advertised("127.0.0.1", 8123, tls=False, interfaces=LOOPBACK):
        assert cluster.discover(1.5, LOOPBACK) == ["http://127.0.0.1:8123"]
    assert cluster.discover(0.3, LOOPBACK) == []
    with cluster.advertised("fd00::5", 8124, tls=False, interfaces=LOOPBACK):
        assert cluster.discover(1.5, LOOPBACK) == ["http://[fd00::5]:8124"]


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


def test_a_server_that_none_can_reach_is_not_announced() -> None:
    seen = CliRunner().invoke(cli, ["serve", "-m", "demo", "--port", "0", "--advertise"])
    assert seen.exit_code == 2
    assert "--host" in seen.output
