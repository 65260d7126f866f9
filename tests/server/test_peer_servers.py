"""Servers that give each other pages of the prefix cache: who may ask, and what they answer."""

import contextlib
import socket
import threading
from typing import Any

import pytest
from live_server import LiveServer

from mlxinfer.engine import peers
from mlxinfer.server.keys import ApiKeys

COMPLETIONS = "/v1/completions"
KEYS = ApiKeys.from_plain(["secret"]).with_named({"user": {"key": "u"}}, "keys.toml")
SHARES = {"gives_pages": True}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "UNMEASURED_S", 20.0)
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: None)


def ask(server: LiveServer, ids: list[int], **fields: Any) -> tuple[str, int]:
    """The text of an answer, and how many tokens of its prompt were cached."""
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0, **fields}
    headers = {"x-api-key": "secret"}
    found = server.post(COMPLETIONS, body, headers=headers, timeout=300)
    assert found.status_code == 200, found.text
    answer = found.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def test_a_server_finds_what_another_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_API_KEY", "secret")
    ids = [20, 21, 22, 23] * 20
    with (
        LiveServer(SHARES, keys=KEYS, allow_peers=True) as first,
        LiveServer({"peers": [first.url]}, keys=KEYS) as second,
    ):
        text, cached = ask(first, ids)
        assert cached == 0
        assert ask(second, ids) == (text, 64)
        salted = ask(first, ids, cache_salt="a")[0]
        assert ask(second, ids, cache_salt="b") == (salted, 0)
        assert ask(second, ids, cache_salt="a") == (salted, 64)
        found = second.get("/metrics", headers={"x-api-key": "secret"}).text
        assert 'mlxinfer:peer_pages_total{model_name="demo"} 8.0' in found
        assert 'mlxinfer:peer_failures_total{model_name="demo"} 0.0' in found


class Wire:
    """Passes connections on to a port, and counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self.num_bytes = 0
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near = self._listener.accept()[0]
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._port)) as far:
            back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            back.start()
            self._pass_on(near, far)
            back.join()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.num_bytes += len(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


def test_bytes_sent_are_nearly_those_of_the_pages() -> None:
    ids = [20, 21, 22, 23] * 40
    with LiveServer(SHARES, bundled="demo", allow_peers=True) as first:
        wire = Wire(first.port)
        with LiveServer({"peers": [wire.url]}, bundled="demo") as second:
            assert ask(first, ids)[0] == ask(second, ids)[0]
            came = second.stats()["peers"]
        wire.close()
    assert came["pages"] == 9
    print(f"{wire.num_bytes} bytes sent, {came['bytes']} of pages")
    assert wire.num_bytes <= 1.02 * came["bytes"]


def test_a_long_prompt_is_computed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: 30.0)
    ids = [20, 21, 22, 23] * 40
    with (
        LiveServer(SHARES, allow_peers=True) as first,
        LiveServer({"prefill_at": first.url}) as second,
    ):
        text, cached = ask(second, ids, cache_salt="a")
        assert cached == 144
        assert second.stats()["prompt_tokens_computed"] == 16
        assert ask(first, ids, cache_salt="a")[0] == text


def test_pages_are_given_where_that_is_allowed() -> None:
    body = {"namespace": "0" * 40, "keys": "1" * 40}
    with LiveServer(SHARES, keys=KEYS) as server:
        refused = server.post("/v1/kv/held", body, headers={"x-api-key": "secret"})
        assert refused.status_code == 404
        assert "allow-peers = true" in refused.text
        assert server.post("/v1/kv/held", body, headers={"x-api-key": "u"}).status_code == 403


def test_keys_of_other_pages_and_misshapen_ones_are_refused_by_name() -> None:
    with LiveServer(SHARES, allow_peers=True) as server:
        namespace = server.model.session.pages.namespace()
        assert namespace is not None
        known = {"namespace": namespace.hex(), "keys": "1" * 40 + "2" * 40}
        assert server.post("/v1/kv/held", known).content == b"00"
        assert server.post("/v1/kv/entries", known).content == b""
        other = server.post("/v1/kv/held", {**known, "namespace": "0" * 40})
        assert (other.status_code, "weights" in other.text) == (404, True)
        for wrong in ({"keys": "1" * 39}, {"keys": "x" * 40}, {"namespace": "0"}):
            assert server.post("/v1/kv/entries", {**known, **wrong}).status_code == 400
        prompt = {"namespace": namespace.hex(), "token_ids": [-1]}
        assert server.post("/v1/kv/compute", prompt).status_code == 400
