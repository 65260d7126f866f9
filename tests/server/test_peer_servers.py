"""Servers that give each other pages of the prefix cache: who may ask, and what they answer."""

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
    found = server.post(COMPLETIONS, body, headers={"x-api-key": "secret"})
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
