"""Bad input: no JSON, values out of range, forms that cannot be compiled, and what is too large."""

import json
import math
import re
import threading
from types import ModuleType
from typing import Any

import msgspec
import pytest
from bad_input import (
    CHAT,
    COMPLETIONS,
    COUNT,
    GOOD,
    HELLO,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    expect_refusal,
    with_fields,
)
from live_server import LiveServer, chat
from scripted import ScriptedServer

from mlxinfer.errors import InvalidRequestError
from mlxinfer.grammar import response_format, schema, spec
from mlxinfer.grammar.compiler import CheckProcess
from mlxinfer.server import http
from mlxinfer.server.apis import anthropic, completions, responses
from mlxinfer.server.apis import chat as chats
from mlxinfer.text.tokenizer import PIECE_CHARS
from tests.watching import note_calls

pytestmark = pytest.mark.usefixtures("whole")


def with_raw(path: str, raw: bytes) -> bytes:
    """A good body with one more member, spelled by hand."""
    return json.dumps(GOOD[path]).encode()[:-1] + b", " + raw + b"}"


@pytest.mark.parametrize("path", GOOD)
def test_a_body_that_is_no_object_is_refused(live: LiveServer, path: str) -> None:
    no_json: dict[str, bytes] = {
        "nothing": b"",
        "half": b'{"messages": [',
        "an array": b"[]",
        "null": b"null",
        "no UTF-8": b'{"a": "\xff\xfe"}',
        "a surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "two values": b"{}{}",
        "a form": b"messages=x&model=demo",
        "deep arrays": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep and open": b"[" * 1_000_000,
    }
    for body in no_json.values():
        expect_refusal(live, path, body)


def test_the_problem_is_named(live: LiveServer) -> None:
    problems = (
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"surrogate pair, \ud83d:"),
        (b'{"x": "\\ud83d\\ude00 \\uDE00"}', r"surrogate pair, \uDE00:"),
        (b'{"x": "\\ud83d\\ude00', "truncated"),
        (b'{"messages": [], "x": NaN}', "malformed"),
        (b'{"messages": [], "\\udc00": 1}', "surrogate pair"),
    )
    for body, problem in problems:
        assert problem in expect_refusal(live, CHAT, body)["message"], body


def test_numbers_beyond_any_range_are_refused_by_field(live: LiveServer) -> None:
    huge: list[tuple[bytes, str]] = [
        (b'"max_tokens": ' + b"9" * 5000, "max_tokens"),
        (b'"temperature": 1e999', "temperature"),
        (b'"seed": ' + b"-" + b"9" * 400, "seed"),
        (b'"guided_json": {"minimum": ' + b"9" * 5000 + b"}", "guided_json[...]"),
        (b'"best_of": ' + b"9" * 5000, "best_of"),
        (b'"logit_bias": {"' + b"9" * 5000 + b'": 1}', "logit_bias"),
    ]
    for raw, param in huge:
        expect_refusal(live, CHAT, with_raw(CHAT, raw), param=param)


def test_unknown_fields_are_skipped_whatever_they_hold(live: LiveServer) -> None:
    headers = {"content-type": "application/json"}
    for value in (b"9" * 5000, b"1e999", b'"' + b"y" * 10**6 + b'"'):
        body = with_raw(CHAT, b'"x": ' + value)
        assert live.client.post(CHAT, content=body, headers=headers).status_code == 200


def test_of_two_equal_names_both_are_checked_and_the_last_one_counts(live: LiveServer) -> None:
    good = json.dumps(GOOD[CHAT]).encode()
    expect_refusal(live, CHAT, with_raw(CHAT, b'"temperature": 7e5'), param="temperature")
    expect_refusal(live, CHAT, b'{"temperature": 7e5, ' + good[1:], param="temperature")
    headers = {"content-type": "application/json"}
    answer = live.client.post(CHAT, content=with_raw(CHAT, b'"max_tokens": 1'), headers=headers)
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", [path for path in GOOD if path != "/tokenize"])
def test_an_empty_object_lacks_something(live: LiveServer, path: str) -> None:
    assert "missing" in expect_refusal(live, path, {})["message"]


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 5e-324},
    {"temperature": 2},
    {"temperature": 1, "top_p": 5e-324},
    {"temperature": 1, "min_p": 1},
    {"temperature": 1, "top_k": 2048},
    {"repetition_penalty": 5e-324},
    {"temperature": 1, "repetition_penalty": 100},
    {"temperature": 2, "repetition_penalty": 1e-3, "top_p": 1e-3, "min_p": 1, "top_k": 1},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": {str(i): -100 for i in range(2048)}},
    {"logit_bias": {str(i): 100 for i in range(2048)}, "temperature": 5e-324},
    {"seed": 2**63 - 1, "temperature": 1, "n": 2},
    {"min_tokens": 6},
    {"stop": "\0"},
    {"stop_token_ids": list(range(128))},
]


def test_extremes_that_are_allowed_stay_numbers(live: LiveServer) -> None:
    """There are tokens, and their log-probabilities are finite and none above 0."""
    for fields in EXTREMES:
        request = chat(max_tokens=6, ignore_eos=True, logprobs=True, top_logprobs=2, **fields)
        for choice in live.answer(CHAT, request)["choices"]:
            entries = choice["logprobs"]["content"]
            assert entries, fields
            for entry in [*entries, *(top for e in entries for top in e["top_logprobs"])]:
                assert -math.inf < entry["logprob"] <= 1e-6, fields


def test_extremes_do_not_reach_their_neighbours(live: LiveServer) -> None:
    """In one batch with the strangest parameters a request gets the tokens that it gets alone."""
    alone = live.post(CHAT, chat("What is 47 + 38", max_tokens=12)).json()
    prompts = {"prompt": "What is 47 + 38", "max_tokens": 60, "ignore_eos": True}
    with live.stream(
        COMPLETIONS, {**prompts, "n": 8, "temperature": 5e-324, "logit_bias": {}}
    ) as r:
        next(r.iter_lines())
        for fields in EXTREMES[:3]:
            with live.stream(CHAT, chat(max_tokens=60, ignore_eos=True, **fields)):
                together = live.post(CHAT, chat("What is 47 + 38", max_tokens=12)).json()
                assert together["choices"] == alone["choices"]


def test_grammars_compile_in_a_server_that_is_larger_than_their_limit() -> None:
    """The peak of the parent, which Linux hands down, is not the checking process's own."""
    limit = 300 << 20
    filled = bytearray(b"x") * limit  # touched, so that it counts
    checker = CheckProcess(max_bytes=limit)
    checker.check(spec.json_schema({"type": "string"}))
    checker.close()
    assert len(filled) == limit


NUMBERS = [0] * 600_000  # of which a request may have two bytes each, and a field has too many
SCHEMA = {"enum": NUMBERS}
CALLS = '{"a":' + str([1000] * 30_000) + "}"  # fits nowhere, and is soon sent


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


LARGE: list[tuple[str, str, Any]] = [
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    (CHAT, "structured_outputs", {"choice": NUMBERS}),
    (CHAT, "guided_json", SCHEMA),
    (CHAT, "tools", [tool(a=NUMBERS)]),
    (CHAT, "tool_choice", {"a": NUMBERS}),
    (CHAT, "chat_template_kwargs", {"enable_thinking": NUMBERS}),
    (COMPLETIONS, "guided_json", SCHEMA),
    (COMPLETIONS, "guided_choice", ["x" * 4000] * 400),
    (RESPONSES, "tools", [{"type": "function", "name": "f", "parameters": {"a": NUMBERS}}]),
    (MESSAGES, "tools", [{"name": "f", "input_schema": {"a": NUMBERS}}]),
    (COUNT, "tools", [{"name": "f", "input_schema": {"a": NUMBERS}}]),
    (TOKENIZE, "chat_template_kwargs", {"enable_thinking": NUMBERS}),
]


def test_large_bodies_are_not_walked(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "walk", not_so_large(schema.walk))
    for path, field, value in LARGE:
        given = {"messages": HELLO} if path == TOKENIZE else with_fields(path)
        error = expect_refusal(live, path, {**given, field: value}, param=field)
        assert "bytes of JSON; at most 1048576 are accepted" in error["message"]


def not_so_large(walk: Any) -> Any:
    """The same, where it is not given what takes it long."""

    def checked(value: Any, **kwargs: Any) -> Any:
        assert len(msgspec.json.encode(value)) <= schema.MAX_BYTES
        return walk(value, **kwargs)

    return checked


def test_long_reads_are_off_the_loop(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[str, ModuleType, tuple[str, ...]]] = [
        (CHAT, chats, ("constraint", "check_tools")),
        (COMPLETIONS, completions, ("constraint",)),
        (RESPONSES, responses, ("conversation", "read_tools")),
        (MESSAGES, anthropic, ("sampling_params", "openai_tools")),
        (COUNT, anthropic, ("conversation", "openai_tools")),
    ]

    def thread(*_: Any, **__: Any) -> str:
        return threading.current_thread().name

    for path, api, names in reads:
        with monkeypatch.context() as patch:
            threads = [note_calls(patch, api, name, thread) for name in names]
            assert live.post(path, with_fields(path)).status_code == 200
        assert all(threads), path
        assert all(name.startswith("mlxinfer-text") for called in threads for name in called)


def test_what_is_wrong_is_not_quoted_whole(scripted: ScriptedServer) -> None:
    wrong: list[dict[str, Any]] = [  # a choice, a name in it, a type, a name
        {"tools": [tool()], "tool_choice": {"a": "x" * 5000}},
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x" * 5000}}},
        {"tools": [{"type": "x" * 5000}]},
        {"tools": [{"type": "function", "function": {"name": "x" * 5000}}]},
    ]
    for value in ({"type": "x", "y": NUMBERS}, NUMBERS, {"type": NUMBERS}):
        with pytest.raises(InvalidRequestError, match="expected") as caught:
            response_format(value)
        assert len(str(caught.value)) < 300
    for fields in wrong:
        error = expect_refusal(scripted, CHAT, {"messages": HELLO, **fields})
        assert len(error["message"]) < 300


def test_millions_of_lists_are_not_decoded(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = b'{"messages":[{"role":"user","content":"x"}],"documents":['
    monkeypatch.setattr(http, "msgspec", None)  # decoding it fails
    for pair in (b"[]", b"{}"):
        large = request + pair + (b"," + pair) * 1_000_000 + b"]}"
        error = expect_refusal(live, CHAT, large)
        assert error["message"].startswith("The body holds 100000")


FAR = {"a": [1000] * 30_000}
CALLED = {"tool_calls": [{"function": {"name": "f", "arguments": CALLS}}]}
USED = {"type": "tool_use", "id": "a", "name": "f", "input": FAR}
ITEM = {"type": "function_call", "name": "f", "call_id": "a", "arguments": CALLS}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": (CHAT, {"messages": HELLO, "tools": [tool(**FAR)]}),
    "tools of responses": (
        RESPONSES,
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": FAR}]},
    ),
    "tools of messages": (
        MESSAGES,
        {"messages": HELLO, "max_tokens": 2, "tools": [{"name": "f", "input_schema": FAR}]},
    ),
    "a call": (CHAT, {"messages": [{"role": "assistant", **CALLED}, *HELLO]}),
    "a call in responses": (RESPONSES, {"input": [ITEM, *HELLO]}),
    "a call in messages": (
        MESSAGES,
        {"max_tokens": 2, "messages": [*HELLO, {"role": "assistant", "content": [USED]}, *HELLO]},
    ),
    "thoughts": (
        CHAT,
        {"messages": [{"role": "assistant", "reasoning_content": CALLS, "content": ""}, *HELLO]},
    ),
}


def test_what_is_far_longer_than_the_context_is_not_encoded(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = scripted.model.tokenizer
    lengths = note_calls(monkeypatch, tokenizer, "encode", lambda text, **_: len(text))
    monkeypatch.setattr("mlxinfer.text.tokenizer.EXACT_CHARS", 0)  # shorter texts are counted
    words = re.compile(r"more than \d{4,} tokens|prompt is too long: \d{4,} tokens > 2047 maximum")
    for name, (path, given) in PROMPTS.items():
        param = "input" if path == RESPONSES else "messages"
        said = expect_refusal(scripted, path, given, param=param)["message"]
        assert words.search(said), name
        assert max(lengths, default=0) <= PIECE_CHARS, name


def test_calls_are_measured(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted.model.tokenizer.template, "render", None)
    for name in ("a call", "a call in responses", "a call in messages"):
        expect_refusal(scripted, *PROMPTS[name])
