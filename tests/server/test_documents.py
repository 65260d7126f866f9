"""Files in conversations reach the model as text; what cannot be read is refused by name."""

import base64
import contextlib
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest
from bad_input import expect_refusal
from live_server import CHAT, LiveServer, chat
from models.runs import every
from scripted import ScriptedServer

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.apis.documents import pdf_data, text_of_file
from mlxinfer.server.store import ResponseStore
from tests.pdf_files import encrypted, pdf
from tests.waiting import wait_until

pytest.importorskip("pypdf")
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNTS = {
    RESPONSES: f"{RESPONSES}/input_tokens",
    MESSAGES: f"{MESSAGES}/count_tokens",
    CHAT: "/tokenize",
}

PLACES = {  # of the second part of a conversation, in errors
    RESPONSES: "input[0].content[1].file_data",
    MESSAGES: "messages[0].content[1].source.data",
    CHAT: "messages[0].content[1].file.file_data",
}


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part_of(path: str, data: bytes) -> dict[str, Any]:
    """A PDF as this API has it."""
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "application/pdf", "data": coded(data)}
        return {"type": "document", "title": "a.pdf", "source": source}
    url = f"data:application/pdf;base64,{coded(data)}"
    file = {"filename": "a.pdf", "file_data": url}
    return {"type": "file", "file": file} if path == CHAT else {"type": "input_file", **file}


def asked(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    turns = [{"role": "user", "content": list(parts)}]
    return {"input": turns} if path == RESPONSES else {"max_tokens": 8, "messages": turns}


def result_of(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """A conversation with a tool's result of these parts."""
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
        turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        return {"max_tokens": 8, "messages": turns}
    if path == CHAT:
        return asked(path, *parts)
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"input": [called, {"type": "function_call_output", "call_id": "c", "output": parts}]}


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("body_of", every(2, [asked, result_of]))
def test_pdfs_are_read(scripted: ScriptedServer, path: str, body_of: Any) -> None:
    body = body_of(path, part_of(path, pdf("One", "Two")), part_of(path, pdf("Other")))
    with scripted.says("Yes"):
        assert scripted.post(path, body).status_code == 200
        files = [f'<file name="a.pdf">\n{text}\n</file>' for text in ("One\n\nTwo", "Other")]
        assert "\n".join(files) in scripted.prompt
        num_tokens = len(scripted.script.requests[-1].prompt_ids)
    counted = scripted.post(COUNTS[path], body).json()
    assert counted["count" if path == CHAT else "input_tokens"] == num_tokens


@pytest.mark.parametrize("path", every(3, COUNTS))
@pytest.mark.parametrize(
    ("data", "said"),
    [(b"%PDF-1.4", "no PDF"), (pdf(""), "no text"), (encrypted(pdf("x"), "?"), "encrypted")],
)
def test_unreadable_pdfs_are_refused(live: LiveServer, path: str, data: bytes, said: str) -> None:
    body = asked(path, part_of(path, pdf("Sound")), part_of(path, data))
    error = expect_refusal(live, path, body, param=PLACES[path])
    assert said in error["message"]
    assert error["message"].startswith(PLACES[path])


def test_a_pdf_without_a_media_type_is_known_by_its_beginning(scripted: ScriptedServer) -> None:
    part = {"type": "input_file", "file_data": coded(pdf("Text", indexed=False))}
    with scripted.says("Yes"):
        assert scripted.post(RESPONSES, asked(RESPONSES, part)).status_code == 200
        assert "<file>\nText\n</file>" in scripted.prompt


def test_a_stored_response_keeps_the_text(live: LiveServer) -> None:
    with LiveServer(store=ResponseStore(None)) as server:
        body = asked(RESPONSES, part_of(RESPONSES, pdf("Text")))
        first = server.post(RESPONSES, {**body, "max_output_tokens": 4}).json()
        items = server.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
        assert items[0]["content"][0]["file_data"] == f"data:text/plain;base64,{coded(b'Text')}"
        after = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 4}
        second = server.post(RESPONSES, after).json()
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.ci
def test_a_slow_pdf_holds_up_no_other_request_and_ends_with_its_client() -> None:
    slow = pdf(*["x) Tj (x" * 3000] * 400)
    answers: list[int] = []
    with LiveServer(text_workers=1, long_text_workers=1, image_fetchers=1) as server:

        def ask() -> None:
            body = asked(RESPONSES, part_of(RESPONSES, slow))
            with contextlib.suppress(httpx.ReadTimeout):
                answers.append(server.client.post(RESPONSES, json=body, timeout=3).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: bool(server.service.calls))
        assert server.post(CHAT, chat()).status_code == 200
        asking.join()
        assert not answers
        wait_until(lambda: not server.service.calls)


def test_a_pdf_may_be_part_of_a_system_prompt(scripted: ScriptedServer) -> None:
    body = {
        **asked(MESSAGES, {"type": "text", "text": "?"}),
        "system": [part_of(MESSAGES, pdf("A"))],
    }
    with scripted.says("Yes"):
        assert scripted.post(MESSAGES, body).status_code == 200
        assert '<file name="a.pdf">\nA\n</file>' in scripted.prompt


@pytest.mark.parametrize("given", ["data:" + ";" * 30_000_000, "data:" + "a" * 30_000_000 + ","])
def test_a_long_beginning_of_a_data_url_costs_nothing(given: str) -> None:
    began = time.process_time()
    assert pdf_data(given) is None
    with pytest.raises(InvalidRequestError):
        text_of_file(given, "file")
    assert time.process_time() - began < 1
