"""Answers that the server generates for stored conversations, without a browser."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_server import PageServer

from mlxinfer.server.keys import ApiKeys
from tests.waiting import wait_until

CHAT, QUESTION, ANSWER = "chatchat", "question1", "answeransw"
BODY = {
    "conversation": CHAT,
    "message": {"id": ANSWER, "parent": QUESTION, "details": {"model": "demo"}},
    "request": {
        "model": "demo",
        "messages": [{"role": "user", "content": "Go"}],
        "stream_options": {"include_usage": True},
    },
}
PATH = f"/page/answers/{ANSWER}"
LEFT = {"authorization": "Bearer left-key"}
RIGHT = {"authorization": "Bearer right-key"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    with PageServer(tmp_path, keys=ApiKeys.from_plain(["left-key", "right-key"])) as running:
        question = {"conversation": CHAT, "id": QUESTION, "role": "user", "content": "Go"}
        assert running.post("/history/messages", question, headers=LEFT).status_code == 200
        yield running


@contextmanager
def following(server: PageServer, method: str = "GET", **kwargs: Any) -> Iterator[Iterator[Any]]:
    """The events of an answer as they come."""
    path = "/page/answers" if method == "POST" else PATH
    with server.client.stream(method, path, headers=LEFT, timeout=60, **kwargs) as response:
        assert response.status_code == 200, response.read()
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: "))
        yield (json.loads(line) for line in lines if line != "[DONE]")


def stored(server: PageServer) -> list[dict[str, Any]]:
    card = server.get(f"/history/conversations/{CHAT}", headers=LEFT).json()
    return list(card["messages"])


def test_an_answer_is_followed_by_several_clients_and_stored_once(server: PageServer) -> None:
    server.script.says("<think>Hm.</think>One", " two")
    with following(server, "POST", json=BODY) as events:
        text = ""
        while text != "One":
            text += next(events)["content"]
        with following(server) as others, following(server, "POST", json=BODY) as again:
            assert next(others)["content"] == next(again)["content"] == "One"
        listed = server.get("/history/conversations", headers=LEFT).json()["data"]
        assert [answer["answering"] for answer in listed] == [ANSWER]
        assert server.get(PATH, headers=RIGHT).status_code == 404
        assert server.client.delete(PATH, headers=RIGHT).status_code == 404
        server.script.go_on.set()
        *_, last = events
    assert len(server.script.requests) == 1
    [_, answer] = stored(server)
    assert (answer["reasoning"], answer["content"]) == ("Hm.", "One two")
    assert answer["details"] == last["details"]
    assert answer["details"]["finish"] == "stop"
    assert answer["details"]["usage"]["answer"] > 2
    with following(server) as ended:  # for a tab that learnt of the answer too late
        assert [event["content"] for event in ended] == ["One two"]
    assert server.get(PATH, headers=RIGHT).status_code == 404


def test_a_stopped_answer_stays_and_a_deleted_chat_stays_deleted(server: PageServer) -> None:
    server.script.says("One", " two")
    with following(server, "POST", json=BODY) as events:
        wait_until(lambda: "One" in next(events)["content"])
        assert server.client.delete(PATH, headers=LEFT).status_code == 200
        assert list(events)[-1]["details"]["finish"] == "stopped"
    assert stored(server)[-1]["content"] == "One"
    assert server.script.aborted.wait(60)
    server.script.reset()
    server.script.says("One", " two")
    with following(server, "POST", json=BODY) as events:
        wait_until(lambda: "One" in next(events)["content"])
        path = f"/history/conversations/{CHAT}"
        assert server.client.delete(path, headers=LEFT).status_code == 200
    assert server.get("/history/conversations", headers=LEFT).json()["data"] == []


def test_errors_become_part_of_the_answer(server: PageServer) -> None:
    reply = server.post("/page/answers", {**BODY, "request": {"messages": 1}}, headers=LEFT)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "request.messages")
    wrong = {**BODY, "request": {"model": "no-such", "messages": []}}
    with following(server, "POST", json=wrong) as events:
        assert "no-such" in list(events)[-1]["details"]["error"]
    assert "no-such" in stored(server)[-1]["details"]["error"]


def test_without_a_history_an_answer_ends_with_its_last_client(tmp_path: Path) -> None:
    with PageServer(tmp_path, history=False) as server:
        server.script.says("One", " two")
        with following(server, "POST", json=BODY) as events:
            wait_until(lambda: "One" in next(events)["content"])
        assert server.script.aborted.wait(60)
