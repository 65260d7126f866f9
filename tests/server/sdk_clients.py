"""The makers' own client libraries, strict about types; and what a scripted model says.

`strictly` checks more than they do: no value of the JSON has another type than its model declares.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import anthropic
import ollama
import openai
import pytest
from live_server import LiveServer
from pydantic import TypeAdapter

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CALLS = [("get_weather", {"city": "Zürich 🙂"}), ("now", {})]
HELLO: Any = [{"role": "user", "content": "Hello"}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "get_weather", "description": "The weather", "parameters": CITY}
CHAT_TOOLS: Any = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "now"}},
]

_STRICT: Any = {
    "api_key": "none",
    "max_retries": 0,
    "timeout": 30,
    "_strict_response_validation": True,
}
_adapter = cache(TypeAdapter)


def openai_client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", **_STRICT)


def anthropic_client(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, **_STRICT)


def ollama_client(server: LiveServer) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=60)


def client_fixture(server: str, client_of: Callable[[Any], Any]) -> Any:
    """A fixture: a client of the server of another fixture, which is idle afterwards."""

    @pytest.fixture
    def client(request: pytest.FixtureRequest) -> Iterator[Any]:
        served: LiveServer = request.getfixturevalue(server)
        with client_of(served) as client:
            yield client
        served.check_idle()

    return client


def strictly(kind: Any, value: Any) -> None:
    """The JSON behind `value` has exactly the types that the library's model declares."""
    _adapter(kind).validate_json(value.to_json(exclude_unset=True), strict=True)
