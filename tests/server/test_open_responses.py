"""The cases of openresponses.org's suite, by its published types, answered by bundled models.

Cases over WebSockets, of hosted tools and of /responses/compact are left out: the server has none.
"""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer
from models.runs import every
from PIL import Image, ImageDraw

from mlxinfer.server.store import ResponseStore
from tests.pdf_files import pdf

pytestmark = pytest.mark.demo

types = pytest.importorskip("openresponses_types.types")
RESPONSES = "/v1/responses"
PLACE = {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": PLACE}, "required": ["location"]},
}
OPENAIS_OWN = {"response.reasoning_text.delta", "response.reasoning_text.done"}  # its SDK's names


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def models_of_events() -> dict[str, Any]:
    events = {}
    for name in dir(types):
        if name.endswith("StreamingEvent"):
            (kind,) = getattr(types, name).model_fields["type"].annotation
            events[kind.value] = getattr(types, name)
    return events


@pytest.fixture(scope="module")
def keeping() -> Iterator[LiveServer]:
    with LiveServer(bundled="demo", store=ResponseStore(None)) as server:
        yield server


def answer(server: LiveServer, *, stream: bool = False, **body: Any) -> dict[str, Any]:
    """A completed response, checked by the published types as its events are."""
    given = {"model": "demo", "temperature": 0, **body}
    if stream:
        events = server.events(RESPONSES, {**given, "stream": True})
        known = models_of_events()
        for event in events:
            if event["type"] not in OPENAIS_OWN:
                known[event["type"]].model_validate(event)
        result = events[-1]["response"]
        kinds = [event["type"] for event in events]
        called = any(item["type"] == "function_call" for item in result["output"])
        for kind in ("delta", "done"):
            assert (f"response.function_call_arguments.{kind}" in kinds) is called
    else:
        result = server.post(RESPONSES, given).json()
    types.ResponseResource.model_validate(result)
    assert (result["status"], bool(result["output"])) == ("completed", True)
    return dict(result)


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


CHOICES: list[Any] = ["required", {"type": "function", "name": "get_weather"}]
PHASES = [
    message("assistant", "I think of a number.", phase="commentary"),
    message("assistant", "It is four.", phase="final_answer"),
    message("user", "Repeat only the number."),
]
FILE = base64.b64encode(pdf("Title: A file that has no table of objects", indexed=False)).decode()
PDF = [
    {"type": "input_text", "text": "Read the attached file and answer with its title only."},
    {
        "type": "input_file",
        "filename": "file.pdf",
        "file_data": f"data:application/pdf;base64,{FILE}",
    },
]
CASES: dict[str, list[dict[str, Any]]] = {
    "basic": [message("user", "Say hello in exactly 3 words.")],
    "streaming": [message("user", "Count from 1 to 5.")],
    "system prompt": [message("system", "You are a pirate."), message("user", "Say hello.")],
    "assistant phase": PHASES,
    "file input": [{**message("user", ""), "content": PDF}],
}


@pytest.mark.alike
@pytest.mark.parametrize("stream", every(2, [False, True]))
@pytest.mark.parametrize("case", every(2, CASES))
def test_messages_are_answered(keeping: LiveServer, case: str, stream: bool) -> None:
    assert text_of(answer(keeping, input=CASES[case], stream=stream))


@pytest.mark.parametrize("stream", every(2, [False, True]))
def test_a_tool_that_fits_is_called(keeping: LiveServer, stream: bool) -> None:
    asked = message("user", "What's the weather like in San Francisco?")
    response = answer(keeping, input=[asked], tools=[WEATHER], stream=stream)
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert call["name"] == "get_weather"
    assert set(json.loads(call["arguments"])) == {"location"}


def test_a_conversation_is_remembered(keeping: LiveServer) -> None:
    turns = [
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
    ]
    question = message("user", "What is my name?")
    assert "Alice" in text_of(answer(keeping, input=[*turns, question]))
    first = answer(keeping, input="My name is Alice.")
    assert "Alice" in text_of(answer(keeping, input=[question], previous_response_id=first["id"]))


@pytest.mark.alike
@pytest.mark.parametrize("stream", every(2, [False, True]))
@pytest.mark.parametrize("choice", every(2, CHOICES))
def test_a_call_and_its_result(keeping: LiveServer, choice: Any, stream: bool) -> None:
    asked = message("user", "What is the weather in San Francisco?")
    first = answer(keeping, input=[asked], tools=[WEATHER], tool_choice=choice, stream=stream)
    call = next(item for item in first["output"] if item["type"] == "function_call")
    assert call["name"] == "get_weather"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
    whole = [asked, {k: call[k] for k in ("type", "call_id", "name", "arguments")}, result]
    for fields in ({"input": whole}, {"input": [result], "previous_response_id": first["id"]}):
        second = answer(keeping, tools=[WEATHER], stream=stream, **fields)
        assert text_of(second)


@pytest.mark.parametrize("stream", every(2, [False, True]))
def test_a_picture_is_described(stream: bool) -> None:
    drawing, file = Image.new("RGB", (112, 112), "white"), io.BytesIO()
    ImageDraw.Draw(drawing).ellipse((30, 30, 80, 80), fill="red")
    drawing.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "input_text", "text": "What is in this picture?"},
        {"type": "input_image", "image_url": url},
    ]
    with LiveServer(bundled="demo-vision") as server:
        response = answer(server, input=[{**message("user", ""), "content": parts}], stream=stream)
    assert "red circle" in text_of(response)
