"""Bad input: tools with wrong names, schemas and choices, in the words of three APIs."""

from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import CHAT, COUNT, HELLO, MESSAGES, RESPONSES, TOKENIZE, expect_refusal, unharmed
from live_server import LiveServer
from scripted import ScriptedServer


@pytest.fixture(scope="module", autouse=True)
def whole(live: LiveServer) -> Iterator[None]:
    """The demo model's template knows no tools; most of these go to another server."""
    yield from unharmed(live)


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server
        with server.says("Still here."):
            good = {"messages": HELLO, "tools": [tool("f")], "max_tokens": 20}
            answer = server.post(CHAT, good).json()["choices"][0]["message"]
        assert answer["content"] == "Still here."


def tool(name: Any, parameters: Any = None, **rest: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters or {"type": "object"}, **rest}
    return {"type": "function", "function": function}


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}}


NAMES: list[Any] = ["", " ", "a b", "a\nb", "a" * 300, "f(", "<|im_end|>", 'f"', None, 5, []]


@pytest.mark.parametrize("name", NAMES, ids=lambda n: f"{n!r:.20}")
def test_names(scripted: ScriptedServer, name: Any) -> None:
    expect_refusal(scripted, CHAT, {"messages": HELLO, "tools": [tool(name)]})
    flat = {"type": "function", "name": name, "parameters": {}}
    expect_refusal(scripted, RESPONSES, {"input": "x", "tools": [flat]})
    theirs = {"name": name, "input_schema": {"type": "object"}}
    expect_refusal(scripted, MESSAGES, {"messages": HELLO, "tools": [theirs], "max_tokens": 2})


TOOLS: dict[str, Any] = {
    "a text": "all",
    "an object": {"f": {}},
    "null in a list": [None],
    "texts": ["f"],
    "another type": [{"type": "web_search"}],
    "no function": [{"type": "function"}],
    "a function that is a text": [{"type": "function", "function": "f"}],
    "twice the same name": [tool("f"), tool("f")],
    "parameters that are a list": [tool("f", [1])],
    "parameters that are a text": [tool("f", "object")],
    "parameters of another type": [tool("f", {"type": "string"})],
    "parameters that are deep": [tool("f", deep(300))],
    "too many": [tool(f"f{i}") for i in range(513)],
}


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_tools(scripted: ScriptedServer, path: str, name: str) -> None:
    expect_refusal(scripted, path, {"messages": HELLO, "tools": TOOLS[name]})


STRICT: dict[str, Any] = {
    "another document": {"type": "object", "properties": {"a": {"$ref": "http://evil.example"}}},
    "a hole": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
    "a pattern that is none": {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "("}},
        "required": ["a"],
    },
    "nothing fits": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}},
        "required": ["a"],
    },
}


@pytest.mark.parametrize("name", STRICT)
def test_schemas_that_calls_shall_keep_to(scripted: ScriptedServer, name: str) -> None:
    """A call that is forced is made under a grammar, which these have none of."""
    body = {"messages": HELLO, "tools": [tool("f", STRICT[name])], "tool_choice": "required"}
    assert "tools[0]" in expect_refusal(scripted, CHAT, body)["message"]


CHOICES: list[Any] = [
    *("sometimes", "", 5, True, [], {}, {"type": "function"}, {"type": "function", "function": {}}),
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": {"name": None}},
    {"type": "allowed_tools", "tools": []},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c!r:.50}")
def test_choices(scripted: ScriptedServer, choice: Any) -> None:
    body = {"messages": HELLO, "tools": [tool("f")], "tool_choice": choice}
    expect_refusal(scripted, CHAT, body)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_choice_without_tools(scripted: ScriptedServer, choice: Any) -> None:
    nones: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": None}]
    for none in nones:
        expect_refusal(scripted, CHAT, {"messages": HELLO, "tool_choice": choice, **none})


THEIRS: list[dict[str, Any]] = [
    {"tools": [{"input_schema": {}}]},
    {"tools": [{"name": "f", "input_schema": []}]},
    {"tools": [{"type": "bash_20250124"}]},
    {"tools": [{"name": "f", "type": 3}]},
    {"tools": [{"name": "f"}, {"name": "f"}]},
    {"tools": [{"name": "f", "defer_loading": True}]},
    {"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}},
    {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}},
    {"tools": [{"name": "f"}], "tool_choice": {"type": "sometimes"}},
    {"tools": [{"name": "f"}], "tool_choice": "auto"},
    {"tool_choice": {"type": "any"}},
    {"mcp_servers": [{"type": "url", "url": "https://evil.example"}]},
    {"container": "x"},
]


@pytest.mark.parametrize("fields", THEIRS, ids=lambda f: f"{f!r:.60}")
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_tools_of_messages(scripted: ScriptedServer, path: str, fields: dict[str, Any]) -> None:
    expect_refusal(scripted, path, {"messages": HELLO, "max_tokens": 2, **fields})


FLAT: list[dict[str, Any]] = [
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]},
    {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "file_search"}},
    {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function"}},
    {"tools": [{"type": "function", "name": "f"}], "tool_choice": "any"},
    {"tool_choice": "required"},
    {"max_tool_calls": 0},
]


@pytest.mark.parametrize("fields", FLAT, ids=lambda f: f"{f!r:.60}")
def test_tools_of_responses(scripted: ScriptedServer, fields: dict[str, Any]) -> None:
    expect_refusal(scripted, RESPONSES, {"input": "x", **fields})


def test_a_template_without_tools_refuses_the_same(live: LiveServer) -> None:
    for wrong in ({"tools": [tool("f(")]}, {"tools": [tool("f")], "tool_choice": "always"}):
        expect_refusal(live, CHAT, {"messages": HELLO, **wrong})
