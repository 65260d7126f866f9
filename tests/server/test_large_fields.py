"""Fields that hold any JSON are measured before they are walked through, and off the loop."""

import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
from bad_input import (
    CHAT,
    COMPLETIONS,
    COUNT,
    HELLO,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    expect_refusal,
    unharmed,
    with_fields,
)
from live_server import LiveServer
from scripted import ScriptedServer

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar import response_format, schema, spec
from mlxinfer.server import http
from mlxinfer.server.apis import anthropic, chat, completions, responses
from mlxinfer.text.tokenizer import PIECE_CHARS

MANY = [0] * 600_000  # of which a request may have two bytes each, and a field has too many
SCHEMA = {"enum": MANY}
NAMED = {"type": "json_schema", "name": "x", "schema": SCHEMA}
CALLS = '{"a":' + str([1000] * 30_000) + "}"  # fits nowhere, and is soon sent


@pytest.fixture(scope="module", autouse=True)
def whole(live: LiveServer) -> Iterator[None]:
    yield from unharmed(live)


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


LARGE: list[tuple[str, str, Any]] = [
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    (CHAT, "structured_outputs", {"choice": MANY}),
    (CHAT, "guided_json", SCHEMA),
    (CHAT, "tools", [tool(a=MANY)]),
    (CHAT, "tool_choice", {"a": MANY}),
    (CHAT, "chat_template_kwargs", {"enable_thinking": MANY}),
    (COMPLETIONS, "guided_json", SCHEMA),
    (COMPLETIONS, "guided_choice", ["x" * 4000] * 400),
    (RESPONSES, "tools", [{"type": "function", "name": "f", "parameters": {"a": MANY}}]),
    (MESSAGES, "tools", [{"name": "f", "input_schema": {"a": MANY}}]),
    (COUNT, "tools", [{"name": "f", "input_schema": {"a": MANY}}]),
    (TOKENIZE, "chat_template_kwargs", {"enable_thinking": MANY}),
]


@pytest.mark.parametrize(("path", "field", "value"), LARGE, ids=[f"{p} {f}" for p, f, _ in LARGE])
def test_what_is_large_is_refused_before_it_is_walked(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str, value: Any
) -> None:
    monkeypatch.setattr(schema, "walk", not_so_large(schema.walk))
    given = {"messages": HELLO} if path == TOKENIZE else with_fields(path)
    error = expect_refusal(live, path, {**given, field: value}, param=field)
    assert "bytes of JSON; at most 1048576 are accepted" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [(RESPONSES, "text", "text.format"), (MESSAGES, "output_config", "output_config.format")],
)
def test_so_is_a_large_form_under_another_name(
    live: LiveServer, path: str, field: str, param: str
) -> None:
    error = expect_refusal(live, path, with_fields(path, **{field: {"format": NAMED}}), param=param)
    assert error["message"].startswith(f"{param} has 12000")


def not_so_large(walk: Any) -> Any:
    """The same, where it is not given what takes it long."""

    def checked(value: Any, **kwargs: Any) -> Any:
        assert len(msgspec.json.encode(value)) <= schema.MAX_BYTES
        return walk(value, **kwargs)

    return checked


READS: list[tuple[str, ModuleType, tuple[str, ...]]] = [
    (CHAT, chat, ("constraint", "read_chat_tools")),
    (COMPLETIONS, completions, ("constraint",)),
    (RESPONSES, responses, ("conversation", "read_tools")),
    (MESSAGES, anthropic, ("sampling_params", "openai_tools")),
    (COUNT, anthropic, ("conversation", "openai_tools")),
]


@pytest.mark.parametrize(("path", "api", "names"), READS, ids=[path for path, _, _ in READS])
def test_what_takes_long_is_read_off_the_loop(
    live: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    api: ModuleType,
    names: tuple[str, ...],
) -> None:
    found: dict[str, str] = {}

    def noting(name: str) -> Any:
        function = getattr(api, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            found[name] = threading.current_thread().name
            return function(*args, **kwargs)

        return noted

    for name in names:
        monkeypatch.setattr(api, name, noting(name))
    assert live.post(path, with_fields(path)).status_code == 200
    assert set(found) == set(names)
    assert all(thread.startswith("mlxinfer-text") for thread in found.values()), found


def test_a_schema_is_measured_before_it_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "walk", not_so_large(schema.walk))
    with pytest.raises(InvalidRequestError, match="bytes; at most 1048576"):
        spec.json_schema(SCHEMA)


def test_where_a_schema_is_too_deep_to_be_measured_is_told() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequestError, match=r"/items.*more than 100 levels deep"):
        spec.json_schema(deep)


@pytest.mark.parametrize("value", [{"type": "x", "y": MANY}, MANY, {"type": MANY}])
def test_a_wrong_form_is_not_quoted_whole(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="expected") as error:
        response_format(value)
    assert len(str(error.value)) < 300


WRONG: list[dict[str, Any]] = [
    {"tools": [tool()], "tool_choice": {"a": "x" * 5000}},
    {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x" * 5000}}},
    {"tools": [{"type": "x" * 5000}]},
    {"tools": [{"type": "function", "function": {"name": "x" * 5000}}]},
]


@pytest.mark.parametrize("fields", WRONG, ids=["a choice", "a name in it", "a type", "a name"])
def test_a_wrong_tool_is_not_quoted_whole(scripted: ScriptedServer, fields: dict[str, Any]) -> None:
    error = expect_refusal(scripted, CHAT, {"messages": HELLO, **fields})
    assert len(error["message"]) < 300


@pytest.mark.parametrize("pair", [b"[]", b"{}"])
def test_a_body_of_millions_of_lists_is_not_decoded(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, pair: bytes
) -> None:
    request = b'{"messages":[{"role":"user","content":"x"}],"documents":[' + pair
    large = request + (b"," + pair) * 1_000_000 + b"]}"
    monkeypatch.setattr(http, "msgspec", None)  # decoding it fails
    error = expect_refusal(live, CHAT, large)
    assert error["message"].startswith("The body holds 100000")


PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": (CHAT, {"messages": HELLO, "tools": [tool(a=[1000] * 30_000)]}),
    "tools of responses": (
        RESPONSES,
        {
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": {"a": [1000] * 30_000}}],
        },
    ),
    "tools of messages": (
        MESSAGES,
        {
            "messages": HELLO,
            "max_tokens": 2,
            "tools": [{"name": "f", "input_schema": {"a": [1000] * 30_000}}],
        },
    ),
    "a call": (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": CALLS}}],
                },
                *HELLO,
            ]
        },
    ),
    "a call in responses": (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "name": "f", "call_id": "a", "arguments": CALLS},
                {"role": "user", "content": "x"},
            ]
        },
    ),
    "a call in messages": (
        MESSAGES,
        {
            "max_tokens": 2,
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "tool_use",
                            "id": "a",
                            "name": "f",
                            "input": {"a": [1000] * 30_000},
                        }
                    ],
                },
                *HELLO,
            ],
        },
    ),
    "thoughts": (
        CHAT,
        {"messages": [{"role": "assistant", "reasoning_content": CALLS, "content": ""}, *HELLO]},
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_what_is_far_longer_than_the_context_is_not_encoded(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, given = PROMPTS[name]
    tokenizer, lengths = scripted.model.tokenizer, []
    encode = tokenizer.encode

    def noted(text: str, **kwargs: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", noted)
    error = expect_refusal(
        scripted, path, given, param="input" if path == RESPONSES else "messages"
    )
    words = ("more than 2048 tokens", "prompt is too long: 2048 tokens > 2047 maximum")
    assert any(each in error["message"] for each in words)
    assert max(lengths, default=0) <= PIECE_CHARS


@pytest.mark.parametrize("name", ["a call", "a call in responses", "a call in messages"])
def test_calls_are_measured_before_their_text_is_made(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, given = PROMPTS[name]
    monkeypatch.setattr(scripted.model.tokenizer.template, "render", None)
    expect_refusal(scripted, path, given)
