"""Responses that run in the background: their clients may leave, come back, cancel and delete."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LONG_TOKENS, LiveServer, access_log
from openai.types.responses import Response, ResponseStreamEvent
from sdk_clients import client_fixture, openai_client, strictly

from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.store import ResponseStore
from tests.waiting import wait_until

RESPONSES = "/v1/responses"
LONG: Any = {
    "model": "demo",
    "input": "Count",
    "extra_body": {"ignore_eos": True},
    "max_output_tokens": LONG_TOKENS,
}
client = client_fixture("keeping", openai_client)


@pytest.fixture(scope="module")
def keeping() -> Iterator[LiveServer]:
    with LiveServer(store=ResponseStore(None)) as server:
        yield server


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(
        **{"model": "demo", "input": "Hello", "temperature": 0, "background": True, **fields}
    )


def test_the_line_of_the_log_names_the_answer(client: openai.OpenAI) -> None:
    with access_log() as lines:
        begun = ask(client, max_output_tokens=2)
        wait_until(lambda: any(vars(line)["method"] == "POST" for line in lines))
    assert begun.id.endswith(vars(lines[0])["answer_id"])


def test_a_response_goes_on_without_its_client(client: openai.OpenAI) -> None:
    begun = ask(client)
    strictly(Response, begun)
    assert (begun.status, begun.background, begun.store) == ("queued", True, True)
    collected: list[Response] = []

    def completed() -> bool:
        collected.append(client.responses.retrieve(begun.id))
        strictly(Response, collected[-1])
        return collected[-1].status not in ("queued", "in_progress")

    wait_until(completed)
    assert collected[-1].status == "completed"
    assert collected[-1].output_text == ask(client, background=False).output_text
    assert client.responses.cancel(begun.id) == collected[-1], "it has ended: no effect"
    assert ask(client, previous_response_id=begun.id, background=False).status == "completed"


def test_a_stream_is_resumed_where_it_was_left(client: openai.OpenAI) -> None:
    seen, left = [], ask(client, stream=True, **{**LONG, "max_output_tokens": 300})
    for event in left:
        strictly(ResponseStreamEvent, event)
        seen.append(event)
        if event.sequence_number == 20:
            break
    left.close()
    assert [event.type for event in seen[:3]] == [
        *("response.created", "response.queued", "response.in_progress")
    ]
    response_id = seen[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=20))
    assert [event.sequence_number for event in rest] == list(range(21, 21 + len(rest)))
    assert rest[-1].type == "response.incomplete"
    whole = list(client.responses.retrieve(response_id, stream=True))  # from the store
    assert whole == seen + rest
    text = "".join(event.delta for event in whole if event.type == "response.output_text.delta")
    assert text == client.responses.retrieve(response_id).output_text
    assert not list(client.responses.retrieve(response_id, stream=True, starting_after=10_000))


def test_a_cancelled_response_keeps_its_text(client: openai.OpenAI, keeping: LiveServer) -> None:
    events = iter(ask(client, stream=True, **LONG))
    response_id = next(events).response.id
    while next(events).type != "response.output_text.delta":
        pass
    cancelled = client.responses.cancel(response_id)
    strictly(Response, cancelled)
    assert (cancelled.status, cancelled.output[0].status) == ("cancelled", "incomplete")
    wait_until(keeping.is_idle)
    assert [event.type for event in events][-1] == "response.output_item.done"
    response = client.responses.retrieve(response_id)
    assert response == cancelled == client.responses.cancel(response_id)
    assert response.output_text


def test_a_deleted_response_ends(client: openai.OpenAI, keeping: LiveServer) -> None:
    begun = ask(client, **LONG)
    client.responses.delete(begun.id)
    wait_until(keeping.is_idle)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)
    assert keeping.service.store is not None
    assert not keeping.service.store.events(begun.id)


def test_only_one_in_the_background_is_cancelled(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(ask(client, background=False).id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_each_key_has_its_own_and_limits_hold() -> None:
    keys = ApiKeys.from_plain(["a", "b"])
    mine, other = ({"authorization": f"Bearer {key}"} for key in "ab")
    body = {"input": "Hi", "background": True, "ignore_eos": True, "max_output_tokens": LONG_TOKENS}
    store = ResponseStore(None)
    with LiveServer({"max_batch": 1}, store=store, keys=keys, max_waiting=1, drain_s=0.1) as server:
        running = server.post(RESPONSES, body, headers=mine).json()
        place = f"{RESPONSES}/{running['id']}"
        wait_until(lambda: server.get(place, headers=mine).json()["status"] == "in_progress")
        for method, path in (("GET", ""), ("GET", "?stream=true"), ("DELETE", "")):
            assert server.client.request(method, place + path, headers=other).status_code == 404
        assert server.post(f"{place}/cancel", {}, headers=other).status_code == 404
        waiting = server.post(RESPONSES, body, headers=mine).json()
        result = server.get(f"{RESPONSES}/{waiting['id']}", headers=mine).json()
        assert result["status"] == "queued"
        refused = server.post(RESPONSES, body, headers=mine)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert server.client.delete(place, headers=mine).json()["deleted"]


def test_a_server_that_ends_stores_what_it_ends() -> None:
    store = ResponseStore(None)
    close = store.close
    store.close = lambda: None  # type: ignore[method-assign]
    with LiveServer(store=store, drain_s=0.1) as server:
        body = {"input": "Hi", "background": True, "ignore_eos": True}
        begun = server.post(RESPONSES, body).json()
    chain = store.chain("", begun["id"])
    assert chain is not None
    assert b'"status":"failed"' in chain[-1].response
    assert b"response.failed" in store.events(begun["id"])[-1]
    close()
