"""Servers that give each other pages of the prefix cache: who may ask, and what they answer."""

import base64
import contextlib
import io
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from adapters.drawn import dense_tensors, draw, write_peft
from live_server import CHAT, LiveServer, chat
from PIL import Image

from mlxinfer import hub
from mlxinfer.engine import peers
from mlxinfer.server.keys import ApiKeys
from tests.waiting import wait_until

pytestmark = pytest.mark.demo

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
    answer = server.answer(COMPLETIONS, body, headers=headers, timeout=300)
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
        result = second.get("/metrics", headers={"x-api-key": "secret"}).text
        assert 'mlxinfer:peer_pages_total{model_name="demo"} 8.0' in result
        assert 'mlxinfer:peer_failures_total{model_name="demo"} 0.0' in result


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


@pytest.mark.ci
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


TEXT = "A cat sat on a mat, and a dog saw the cat. " * 8
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": (COMPLETIONS, {"prompt": f"1 {TEXT}", "stop": [" a", "e"], "max_tokens": 30}),
    "grammar": (CHAT, chat(f"2 {TEXT}", response_format=FORM, max_tokens=30)),
    "n and seed": (
        COMPLETIONS,
        {"prompt": f"3 {TEXT}", "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8},
    ),
    "logprobs": (CHAT, chat(f"4 {TEXT}", logprobs=True, top_logprobs=3)),
    "echo": (COMPLETIONS, {"prompt": f"5 {TEXT}", "echo": True, "logprobs": 2, "max_tokens": 4}),
    "batch": (COMPLETIONS, {"prompt": [f"6 {TEXT}", f"7 {TEXT}"], "max_tokens": 4}),
    "tool": (
        CHAT,
        chat(
            f"8 {TEXT}",
            max_tokens=40,
            tool_choice="required",
            tools=[{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        ),
    ),
    "adapter": (CHAT, chat(f"9 {TEXT}", model="demo:pirate")),
    "salt": (COMPLETIONS, {"prompt": f"10 {TEXT}", "cache_salt": "s", "max_tokens": 4}),
}


def choices(server: LiveServer, name: str) -> tuple[list[Any], list[float]]:
    """The answers of one of `ASKED`, and their log-probabilities, which may differ in a last bit.

    Without the ids of tool calls, which no two answers share.
    """
    numbers: list[float] = []
    path, body = ASKED[name]
    reply = server.post(path, {"temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    result = json.loads(reply.text, parse_float=lambda text: numbers.append(float(text)))["choices"]
    for choice in result:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    return list(result), numbers


@pytest.mark.ci
def test_answers_are_those_of_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: 30.0)
    write_peft(tmp_path / "pirate", draw(dense_tensors(hub.resolve("demo-draft")), 1, strength=1.5))
    adapters: dict[str, Any] = {"adapter_folders": (str(tmp_path),)}
    with LiveServer(**adapters) as alone:
        alone.post("/v1/load_lora_adapter", {"lora_name": "pirate", "lora_path": "pirate"})
        expected = {name: choices(alone, name) for name in ASKED}
    with (
        LiveServer(SHARES, allow_peers=True) as first,
        LiveServer({"prefill_at": first.url}, **adapters) as second,
    ):
        second.post("/v1/load_lora_adapter", {"lora_name": "pirate", "lora_path": "pirate"})
        with ThreadPoolExecutor() as threads:
            actual = dict(zip(ASKED, threads.map(partial(choices, second), ASKED), strict=True))
        for name, (texts, numbers) in expected.items():
            assert actual[name][0] == texts, name
            assert actual[name][1] == pytest.approx(numbers, abs=1e-3), name
        came = second.stats()["peers"]
        assert (came["pages"] > 40, came["failures"]) == (True, 0)


def test_prompts_with_pictures_are_exchanged_not_delegated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: 30.0)
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    picture = {"type": "image_url", "image_url": {"url": url}}
    parts = [picture, {"type": "text", "text": f"What is it? {TEXT}"}]
    body = chat("") | {"messages": [{"role": "user", "content": parts}]}

    def told(server: LiveServer) -> tuple[str, int]:
        reply = server.post(CHAT, body, timeout=300).json()
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return reply["choices"][0]["message"]["content"], cached

    with LiveServer(SHARES, bundled="demo-vision", allow_peers=True) as first:
        with LiveServer({"prefill_at": first.url}, bundled="demo-vision") as second:
            text, cached = told(second)
            assert cached == 0
            assert not first.stats()["prompt_tokens_computed"]
        assert told(first) == (text, 0)
        with LiveServer({"prefill_at": first.url}, bundled="demo-vision") as third:
            again, cached = told(third)
            assert (again, cached > 32) == (text, True)
            assert third.stats()["peers"]["failures"] == 0


def test_a_client_leaves_while_its_prompt_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.engine.pagestore.PageStore.computing_s", lambda *_: 30.0)
    with (
        LiveServer(SHARES, allow_peers=True) as first,
        LiveServer({"prefill_at": first.url}) as second,
    ):
        for n in range(6):
            body = {"prompt": f"{n} {TEXT}" * 4, "max_tokens": 4}
            with contextlib.suppress(httpx.ReadTimeout):
                second.post(COMPLETIONS, body, timeout=0.02 * n + 0.01)
        ids = [20, 21, 22, 23] * 40
        text, cached = ask(second, ids)
        assert cached == 144
        assert ask(first, ids)[0] == text
        assert second.stats()["peers"]["failures"] == 0
        wait_until(lambda: not first.stats()["running"] and not first.service.calls)


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
