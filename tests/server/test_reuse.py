"""Why a prompt was computed again: each cause, and what each key is shown."""

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import LiveServer, chat

from mlxinfer.core import Request, Reuse, ReuseEnd, SamplingParams
from mlxinfer.server import reuse as reuse_module
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.reuse import MAX_RECORDS, ReuseRecords

PAGE = 16
CHAT = "/v1/chat/completions"


class Model:
    """What the records use of a model; a token is a letter."""

    def __init__(self, name: str = "m") -> None:
        self.name, self.session = name, _Session()
        self.tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))


class _Session:
    info = SimpleNamespace(name="m")


def picture(start: int, digest: bytes) -> Any:
    return SimpleNamespace(start=start, stop=start + 4, picture=SimpleNamespace(digest=digest * 16))


def request(
    text: str, tokens: int = 0, end: str = "new", missing: int | None = None, **fields: Any
) -> Request:
    tiers = ("memory",) * (tokens // PAGE)
    result = Reuse(tokens, tiers, missing, ReuseEnd(end), PAGE)
    return Request("r", [ord(c) for c in text], SamplingParams(), reuse=result, **fields)


LONG = "abcdefghijklmnopqrstuvwxyz" * 3  # 78 tokens: four whole pages
SECOND = LONG[:40] + "!" * 38


@pytest.mark.parametrize(
    ("again", "cause", "position"),
    [
        (request(LONG, 77, "complete"), "complete", 77),
        (request(SECOND, 40, missing=2), "text_differs", 40),
        (request(LONG + "and more of it, a page", 78, missing=4), "goes_on", 78),
        (request("!" + LONG, missing=0), "never_seen", 0),
        (request(LONG, 16, missing=1), "not_kept", 16),
        (request(LONG, 64, "complete"), "complete", 64),  # models that go on at whole pages
        (request(LONG, 0, missing=0, adapter="a"), "another_adapter", 0),
        (request(LONG, 0, missing=0, cache_salt="s"), "another_salt", 0),
        (request(SECOND, 60, missing=4), "never_seen", 60),  # others had more of it
        *(
            (request(LONG, 16, end, 1), end, 16)
            for end in ("evicted", "below_window", "no_snapshot", "limited", "disabled")
        ),
    ],
)
def test_each_end_of_reuse_has_a_cause(again: Request, cause: str, position: int) -> None:
    records, model = ReuseRecords(), Model()
    records.add("1", "one", 0, model, request(LONG))  # type: ignore[arg-type]
    records.add("2", "two", 0, model, again)  # type: ignore[arg-type]
    shown = records.of(None)[0]
    assert (shown["cause"], shown["position"]) == (cause, position)
    assert shown["message"] == reuse_module.MESSAGES[cause]
    assert sum(shown["tiers"].values()) == shown["cached_tokens"]


def test_the_first_words_that_differ_are_shown() -> None:
    records, model = ReuseRecords(), Model()
    first = records.add("1", "one", 0, model, request(LONG))  # type: ignore[arg-type]
    assert first is not None
    records.answered(None, first, [ord(c) for c in "the answer"])
    again = request(LONG + "the other", 80, missing=5)
    records.add("2", "two", 0, model, again)  # type: ignore[arg-type]
    shown = records.find(None, "chatcmpl-2")
    assert shown == records.find(None, "two")
    assert shown is not None
    assert (shown["differs_at"], shown["earlier_id"]) == (82, "1")
    assert (shown["text"], shown["earlier_text"]) == ("other", "answer")


def test_pictures_and_models_that_are_loaded_again() -> None:
    records, model = ReuseRecords(), Model()

    def cause(model: Model, digest: bytes) -> str:
        asked = request(LONG, 20, missing=1, pictures=(picture(20, digest),))
        record = records.add("1", "one", 0, model, asked)  # type: ignore[arg-type]
        assert record is not None
        return str(record.shown["cause"])

    cause(model, b"a")
    assert cause(model, b"b") == "another_picture"
    assert records.of(None)[0]["text"] == "[picture]"
    assert cause(Model(), b"b") == "model_reloaded"


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_module, "MAX_IDS", 3 * len(LONG))
    records, model = ReuseRecords(), Model()
    for number in range(MAX_RECORDS + 5):
        records.add(str(number), "it", 0, model, request(LONG))  # type: ignore[arg-type]
    assert len(records.of(None)) == MAX_RECORDS
    assert sum(item.ids is not None for item in records._of[None]) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_a_key_sees_nothing_of_another_key(shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlxinfer.server")
    keys, same = ApiKeys.from_plain(["a", "b"]), "Words that both keys send at first. " * 8
    with LiveServer(keys=keys, share_prefixes=shared) as server:

        def ask(key: str, text: str) -> Any:
            body = chat(same + text, return_cached_tokens_details=True)
            return server.post(CHAT, body, headers=bearer(key)).json()

        def get(key: str, path: str) -> Any:
            return server.client.get(path, headers=bearer(key))

        secret = ask("a", "Zanzibar is the secret of the first.")
        mine = ask("b", "Quebec is what the second one says.")
        shown = get("b", f"/v1/reuse/{mine['id']}").json()
        assert get("b", f"/v1/reuse/{secret['id']}").status_code == 404
        listed = get("b", "/v1/reuse").json()["data"]
        assert listed == [shown]
        assert shown["cause"] == "never_seen"
        assert (shown["cached_tokens"] > 0) is shared
        assert "Zanzibar" not in json.dumps(listed)
        again = ask("b", "Ottawa is what it says later.")
        shown = get("b", f"/v1/reuse/{again['id']}").json()
        assert shown["cause"] == "text_differs"
        assert "Ottawa".startswith(shown["text"].split()[0][:1])
        assert "Que" in shown["earlier_text"]
        details = again["usage"]["prompt_tokens_details"]
        assert details["cached_tokens_details"]["cause"] == "text_differs"
        assert details["cached_tokens_details"]["memory"] == details["cached_tokens"]
        plain = server.post(CHAT, chat(same), headers=bearer("b")).json()["usage"]
        assert "cached_tokens_details" not in plain["prompt_tokens_details"]
    noted = [record for record in caplog.records if record.message == "prompt reuse"]
    assert [record.__dict__["cause"] for record in noted[:3]].count("text_differs") == 1
    assert not any("Zan" in str(record.__dict__) for record in noted)


TEXT = "Some words that are longer than a page of the cache, and come twice. " * 2
TURN = [{"role": "user", "content": TEXT}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURN, "max_tokens": 4, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/v1/messages": {"messages": TURN, "max_tokens": 4},
    "/api/chat": {"model": "demo", "messages": TURN, "options": {"num_predict": 4}},
    "/api/generate": {"model": "demo", "prompt": TEXT, "options": {"num_predict": 4}},
    "/completion": {"prompt": TEXT, "n_predict": 4},
}


def details_in(value: Any) -> list[Any]:
    """Every `cached_tokens_details` at any depth of JSON."""
    if isinstance(value, list):
        return [result for item in value for result in details_in(item)]
    if not isinstance(value, dict):
        return []
    details = [value["cached_tokens_details"]] if "cached_tokens_details" in value else []
    return details + details_in(list(value.values()))


def details_of(text: str) -> list[Any]:
    """The same of an answer, of its events or of its lines."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return details_in([json.loads(line) for line in lines if line.startswith("{")])


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer() as opened:
        yield opened


@pytest.mark.alike
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_each_api_says_why_no_more_was_reused(path: str, stream: bool, server: LiveServer) -> None:
    body = {"stream": stream, **ASKED[path]}
    assert details_of(server.post(path, body).text) == []
    again = server.post(path, {**body, "return_cached_tokens_details": True})
    assert again.status_code == 200, again.text
    [result] = details_of(again.text)
    assert (result["cause"], result["message"]) == ("complete", reuse_module.MESSAGES["complete"])
    assert result["memory"] == result["position"] > PAGE


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
