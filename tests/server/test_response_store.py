"""Stored responses: a chain of them, each key its own, within bounds, after a kill."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer
from openai.types.responses import Response
from scripted import ScriptedServer
from sdk_clients import client_fixture, openai_client, strictly

from mlxinfer.server.errors import StoreError
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.store import ResponseStore, StoredResponse

RESPONSES = "/v1/responses"
SKIPPED = "x-mlxinfer-skipped"
client = client_fixture("keeping", openai_client)


@pytest.fixture(scope="module")
def keeping() -> Iterator[ScriptedServer]:
    with ScriptedServer(store=ResponseStore(None)) as server:
        yield server


def ask(client: Any, **fields: Any) -> Any:
    return client.responses.create(**{"model": "demo", "input": "Hello", **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_one_that_is_stored(
    keeping: ScriptedServer, client: openai.OpenAI, stream: bool
) -> None:
    def said(**fields: Any) -> Any:
        if not stream:
            return ask(client, **fields)
        return list(ask(client, stream=True, **fields))[-1].response

    with keeping.says("<think>hm</think>First."):
        first = said(input="One", instructions="Be brief.")
    with keeping.says('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'):
        tool: Any = {"type": "function", "name": "f", "parameters": {}, "strict": False}
        second = said(input="Two", previous_response_id=first.id, tools=[tool])
    result: Any = {"type": "function_call_output", "call_id": second.output[-1].call_id}
    with keeping.says("Third."):
        third = said(input=[{**result, "output": "42"}], previous_response_id=second.id)
        prompt = keeping.prompt
    strictly(Response, third)
    assert (third.store, third.previous_response_id) == (True, second.id)
    whole = ["user\nOne", "<think>hm</think>First.", "user\nTwo", '"x": 1', "tool\n42"]
    places = [prompt.index(text) for text in whole]
    assert places == sorted(places)
    assert "Be brief." not in prompt, "instructions are not carried over"
    counted = client.responses.input_tokens.count(
        model="demo", input="One", previous_response_id=third.id
    )
    assert counted.input_tokens > third.usage.input_tokens


def test_a_reference_stands_for_its_item(keeping: ScriptedServer) -> None:
    """Clients that let answers be stored send only the ids of the items in them."""
    tools: Any = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]
    calls = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    calls += '<tool_call>{"name": "g", "arguments": {"input": "y"}}</tool_call>'
    asked = {"role": "user", "content": "One"}
    with keeping.says(f"<think>hm</think>I look.{calls}"):
        first = keeping.post(RESPONSES, {"input": [asked], "tools": tools}).json()
    said = first["output"]
    assert len(said) == 4
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "5"}
        for item in said[2:]
    ]
    (told,) = keeping.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    prompts = []
    for before in (
        [told, *said],
        [{"type": "item_reference", "id": i["id"]} for i in [told, *said]],
    ):
        with keeping.says("Fine."):
            body = {"input": [*before, *results], "tools": tools}
            second = keeping.post(RESPONSES, body)
            prompts.append(keeping.prompt)
            assert SKIPPED not in second.headers
            keeping.post(RESPONSES, {"input": "And?", "previous_response_id": second.json()["id"]})
            prompts.append(keeping.prompt)
    assert prompts[:2] == prompts[2:]
    assert '"x": 1' in prompts[0]
    with keeping.says("Fine."):
        lost = [{"type": "item_reference", "id": "msg_0a_1"}, asked]
        assert "item_reference" in keeping.post(RESPONSES, {"input": lost}).headers[SKIPPED]


def test_retrieve_list_and_delete(keeping: ScriptedServer, client: openai.OpenAI) -> None:
    with keeping.says("Yes."):
        first = ask(client, input="One")
        second = ask(
            client, input=[{"role": "user", "content": "Two"}], previous_response_id=first.id
        )
    response = client.responses.retrieve(second.id)
    strictly(Response, response)
    assert response.output_text == "Yes."
    assert response.usage == second.usage
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in items.data] == ["One", "Yes.", "Two"]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].content[0].text == "Two"
    assert newest.has_more
    after = client.responses.input_items.list(second.id, after=newest.last_id)
    assert len(after.data) == 2
    client.responses.delete(first.id)
    for lost in (first.id, second.id):  # the second one cannot be continued without the first
        with pytest.raises(openai.NotFoundError):
            ask(client, previous_response_id=lost)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)


def test_what_is_not_to_be_stored_is_not(keeping: ScriptedServer, client: openai.OpenAI) -> None:
    with keeping.says("Yes."):
        answer = ask(client, store=False)
    assert not answer.store
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_wrong_requests_are_named(keeping: ScriptedServer) -> None:
    wrong = [
        ("resp_x", 404, "previous_response_id"),
        ("resp_x/input_items", 404, "previous_response_id"),
        ("{id}?stream=true", 400, "stream"),
        ("{id}?stream=true&starting_after=-2", 400, "starting_after"),
        ("{id}/input_items?limit=0", 400, "limit"),
        ("{id}/input_items?order=up", 400, "order"),
        ("{id}/input_items?after=x", 400, "after"),
    ]
    with keeping.says("Yes."):
        answer = keeping.post(RESPONSES, {"input": "Hi"}).json()
    for path, status, param in wrong:
        reply = keeping.get(f"{RESPONSES}/{path.format(id=answer['id'])}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_without_a_store_nothing_is_continued(scripted: ScriptedServer) -> None:
    with scripted.says("Yes."):
        answer = scripted.post(RESPONSES, {"input": "Hi", "store": True}).json()
        assert answer["store"] is False
        for fields in ({"previous_response_id": answer["id"]}, {"background": True}):
            reply = scripted.post(RESPONSES, {"input": "Hi", **fields})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == next(iter(fields))


def test_each_key_has_its_own() -> None:
    keys = ApiKeys.from_plain(["a", "b"])
    mine, other = ({"authorization": f"Bearer {key}"} for key in "ab")
    with ScriptedServer(store=ResponseStore(None), keys=keys) as server, server.says("Yes."):
        made = server.post(RESPONSES, {"input": "Hi"}, headers=mine).json()
        place = f"{RESPONSES}/{made['id']}"
        assert server.get(place, headers=mine).json() == made
        assert server.get(place, headers=other).status_code == 404
        assert server.client.delete(place, headers=other).status_code == 404
        body = {"input": "Hi", "previous_response_id": made["id"]}
        lost = server.post(RESPONSES, body, headers=other)
        code = lost.json()["error"]["code"]
        assert (lost.status_code, code) == (404, "previous_response_not_found")
        assert server.client.delete(place, headers=mine).json()["deleted"]


def stored(number: int, previous: int | None = None, size: int = 100) -> StoredResponse:
    before = None if previous is None else f"r{previous}"
    return StoredResponse(id=f"r{number}", previous=before, input=b"[]", response=b"x" * (size - 2))


def test_the_least_recently_used_go_first() -> None:
    now = [1000.0]
    store = ResponseStore(None, max_bytes=450, max_age_s=50, clock=lambda: now[0])
    for number, before in enumerate((None, 0, None, None)):
        now[0] += 1
        store.put("", stored(number, before))
    assert [item.id for item in store.chain("", "r1") or ()] == ["r0", "r1"]  # both are used now
    now[0] += 1
    store.put("", stored(4))
    assert store.chain("", "r2") is None, "the least recently used"
    assert store.chain("", "r1") is not None
    now[0] += 51
    for number in range(5):
        assert store.chain("", f"r{number}") is None, "too old"
    store.put("", stored(5, size=1000))
    assert store.chain("", "r5") is None, "larger than all that is kept"


def test_no_key_pushes_out_another_keys_share() -> None:
    store = ResponseStore(None, max_bytes=400)
    for number in range(2):
        store.put("quiet", stored(number))
    for number in range(10, 30):
        store.put("loud", stored(number))
    assert all(store.chain("quiet", f"r{number}") for number in range(2))
    assert [n for n in range(10, 30) if store.chain("loud", f"r{n}")] == [28, 29]


def test_room_goes_by_weight() -> None:
    store = ResponseStore(None, max_bytes=400, weight_of={"heavy": 3.0, "plain": 1.0}.__getitem__)
    for number in range(20):
        store.put("heavy" if number % 2 else "plain", stored(number))
    kept = [n for n in range(20) if store.chain("heavy" if n % 2 else "plain", f"r{n}")]
    assert kept == [15, 17, 18, 19]


NOISE = bytes(range(1, 256)) * 500


@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: NOISE,  # at the start
        lambda data: data[:4096] + NOISE,  # at the first use of a page that is wrong
        # SQLite quotes names in the message of its error, which then is no UTF-8.
        lambda data: data.replace(b"CREATE TABLE", b"CREATE TAB\x80E"),
    ],
    ids=["noise", "a page", "names"],
)
def test_a_damaged_file_is_set_aside(tmp_path: Path, damaged: Any) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path)
    for number in range(100):
        store.put("", stored(number, size=1000))
    store.close()
    path.write_bytes(damaged(path.read_bytes()))
    store = ResponseStore(path)
    with contextlib.suppress(StoreError):
        assert store.chain("", "r1") is None
    store.put("", stored(3))
    assert store.chain("", "r3") is not None
    assert [item for item in tmp_path.iterdir() if ".damaged-" in item.name]


def test_a_place_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.write_text("in the way")
    store = ResponseStore(folder / "responses.db")
    with ScriptedServer(store=store) as server, server.says("Yes."):
        answer = server.post(RESPONSES, {"input": "Hi"}).json()
        assert (answer["store"], answer["status"]) == (False, "completed")
        lost = server.get(f"{RESPONSES}/{answer['id']}")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "store_error")
        assert str(folder) not in lost.text
        folder.unlink()
        assert server.post(RESPONSES, {"input": "Hi"}).json()["store"] is True


def test_a_disk_that_refuses_costs_no_answer(keeping: ScriptedServer) -> None:
    broken = ResponseStore(None)
    broken.close()
    before, keeping.service.store = keeping.service.store, broken
    try:
        with keeping.says("Yes."):
            answer = keeping.post(RESPONSES, {"input": "Hi"})
    finally:
        keeping.service.store = before
    assert answer.status_code == 200
    assert json.loads(answer.content)["store"] is False


def test_live_prompts_are_those_of_the_whole_conversation() -> None:
    with LiveServer(store=ResponseStore(None)) as server:
        first = server.post(RESPONSES, {"input": "Hello", "temperature": 0}).json()
        text = first["output"][0]["content"][0]["text"]
        body = {"temperature": 0, "max_output_tokens": 8}
        after = server.post(
            RESPONSES, {"input": "And now?", "previous_response_id": first["id"], **body}
        ).json()
        turns = [("user", "Hello"), ("assistant", text), ("user", "And now?")]
        items = [{"role": role, "content": content} for role, content in turns]
        whole = server.post(RESPONSES, {"input": items, **body}).json()
    assert after["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert after["output"][0]["content"] == whole["output"][0]["content"]
