"""Calls of tools, whole, streamed and cut off."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from live_server import CHAT, chat
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted import TEMPLATE, ScriptedServer, taught
from sdk_clients import (
    CALLS,
    CHAT_TOOLS,
    CITY,
    NOW,
    WEATHER,
    anthropic_client,
    openai_client,
    strictly,
)

HI: Any = [{"role": "user", "content": "hi"}]


def ask(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "demo", "messages": HI, "tools": CHAT_TOOLS, **fields}
    )


def called(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def test_calls_in_an_answer(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}\n{NOW}"):
        answer = ask(client)
        assert '"get_weather"' in scripted.prompt
    strictly(ChatCompletion, answer)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "hm"
    assert called(choice.message) == CALLS
    assert len({c.id for c in choice.message.tool_calls}) == 2


def test_calls_in_a_stream(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}\n{NOW}"):
        chunks = list(ask(client, stream=True))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    for name, said in (("reasoning_content", "hm"), ("content", "I look.")):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == said
    pieces = [p for c in chunks for p in c.choices[0].delta.tool_calls or []]
    firsts = [p for p in pieces if p.id is not None]
    assert [(p.index, p.type, p.function.name) for p in firsts] == [
        (0, "function", "get_weather"),
        (1, "function", "now"),
    ]
    assert all(p.function.name is None and p.type is None for p in pieces if p.id is None)
    written = "".join(p.function.arguments for p in pieces if p.index == 0)
    assert json.loads(written) == CALLS[0][1]
    assert len(pieces) > 4
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_at_most_without_content(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(f"{WEATHER}\n{NOW}"):
        message = ask(client, parallel_tool_calls=False).choices[0].message
    assert message.content is None
    assert called(message) == CALLS[:1]


def test_a_whole_conversation_with_a_tool(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(WEATHER):
        first = ask(client).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 °C"}
    messages = [*HI, first.model_dump(exclude_none=True), result]
    with scripted.says("It is 18 °C."):
        last = ask(client, messages=messages).choices[0]
        prompt = scripted.prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🙂"}}' in prompt
    assert "tool\n18 °C" in prompt
    assert (last.message.content, last.finish_reason) == ("It is 18 °C.", "stop")


SCHEMA: Any = {
    "type": "object",
    "properties": {"answer": {"type": "boolean"}},
    "required": ["answer"],
    "additionalProperties": False,
}


def allows(scripted: ScriptedServer, request: dict[str, Any], said: str) -> bool:
    with scripted.says(""):
        assert scripted.post(CHAT, request).status_code == 200
        grammar: Any = scripted.script.requests[0].grammar
    for token in scripted.model.tokenizer.encode(said, parse_special=True):
        grammar.accept(token)
    return grammar.problem is None


def test_a_form_leaves_room_for_calls(scripted: ScriptedServer) -> None:
    """With response_format and tools an answer is calls, or a text of that form; nothing else."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    request = {**chat("hi", tools=CHAT_TOOLS, response_format=form), "max_tokens": 60}
    fitting = (WEATHER, f"<think>hm</think>{WEATHER}", '{"answer": true}', "<think>x</think>")
    for said, fits in (*((text, True) for text in fitting), ("I look.", False), ("{}", False)):
        assert allows(scripted, request, said) == fits, said


NOTES: Any = {"type": "custom", "custom": {"name": "notes", "description": "Keeps a note."}}
DIGITS: Any = {"syntax": "regex", "definition": "[0-9]{3}"}
CODE: Any = {
    "type": "custom",
    "custom": {"name": "code", "format": {"type": "grammar", "grammar": DIGITS}},
}


def test_a_custom_tool_is_called_with_plain_text(scripted: ScriptedServer) -> None:
    tools = [*CHAT_TOOLS, NOTES]
    earlier = {"id": "c", "type": "custom", "custom": {"name": "notes", "input": "once"}}
    turns = [
        *HI,
        {"role": "assistant", "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "c", "content": "kept"},
    ]
    said = '<tool_call>{"name": "notes", "arguments": {"input": "a\\nb"}}</tool_call>'
    with scripted.says(said + WEATHER), openai_client(scripted) as client:
        answer: Any = client.chat.completions.create(model="demo", messages=turns, tools=tools)
        assert '"input": "once"' in scripted.prompt
        pieces = [
            call
            for event in scripted.events(CHAT, {"messages": turns, "tools": tools})
            if event != "[DONE]"
            for call in event["choices"][0]["delta"].get("tool_calls", [])
        ]
    strictly(ChatCompletion, answer)
    notes, weather = answer.choices[0].message.tool_calls
    assert (notes.type, notes.custom.name, notes.custom.input) == ("custom", "notes", "a\nb")
    assert weather.function.name == "get_weather"
    (piece,) = [piece for piece in pieces if piece["index"] == 0]
    assert piece["custom"] == {"name": "notes", "input": "a\nb"}
    assert {piece["index"] for piece in pieces} == {0, 1}


def test_a_forced_custom_tool_keeps_to_its_grammar() -> None:
    with taught() as server:
        for choice in ("required", {"type": "custom", "custom": {"name": "code"}}):
            body = {"messages": HI, "tools": [CODE], "tool_choice": choice, "temperature": 0}
            answer = server.answer(CHAT, {**body, "parallel_tool_calls": False})
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert re.fullmatch("[0-9]{3}", call["custom"]["input"])


def test_arguments_of_a_forced_call_are_checked_for_what_masks_cannot_hold() -> None:
    bits = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}
    either = {"oneOf": [{"type": "null"}, {"type": "integer", "maximum": 3}]}
    schema = {
        "type": "object",
        "properties": {"bits": {**bits, "uniqueItems": True}, "n": either},
        "required": ["bits", "n"],
    }
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    with taught() as server:
        server.model.defaults = server.model.defaults.changed({"temperature": 20.0})
        for seed in range(2):
            answer = server.answer(CHAT, {**body, "seed": seed, "parallel_tool_calls": False})
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert sorted(json.loads(call["function"]["arguments"])["bits"]) == [0, 1]
        tool["function"]["strict"] = True
        assert server.post(CHAT, body).status_code == 400


ARGUMENTS = '{"city": "Paris, \\"rue\\" 7", "days": [1, 2, 3], "note": "a }] b"}'
SAID = f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
RESPONSES_TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": CITY}]
ANTHROPIC_TOOLS: Any = [{"name": "get_weather", "input_schema": CITY}]


@dataclass(frozen=True)
class Clients:
    """The makers' libraries; one each, since making one takes longer than many requests."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


@pytest.fixture(scope="module")
def clients(scripted: ScriptedServer) -> Iterator[Clients]:
    with openai_client(scripted) as one, anthropic_client(scripted) as two:
        yield Clients(one, two)


Seen = tuple[str, list[str], str]  # visible text, arguments of the calls, why it ended
Ask = Callable[[Clients, int, bool], Seen]


def chats(clients: Clients, max_tokens: int, stream: bool) -> Seen:
    fields: Any = {"messages": HI, "tools": CHAT_TOOLS[:1], "max_tokens": max_tokens}
    client = clients.openai
    if not stream:
        (choice,) = client.chat.completions.create(model="demo", **fields).choices
        calls = [call.function.arguments for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    chunks = list(client.chat.completions.create(model="demo", stream=True, **fields))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    calls = [""] * len({piece.index for piece in pieces})
    for piece in pieces:
        calls[piece.index] += (piece.function and piece.function.arguments) or ""
    text = "".join(delta.content or "" for delta in deltas)
    return text, calls, chunks[-1].choices[0].finish_reason or ""


def responses(clients: Clients, max_tokens: int, stream: bool) -> Seen:
    fields: Any = {"input": "Hi", "tools": RESPONSES_TOOLS, "max_output_tokens": max_tokens}
    client = clients.openai
    answer: Any = client.responses.create(model="demo", stream=stream, **fields)
    if stream:
        events = list(answer)
        answer = events[-1].response
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == answer.output_text
    calls = [item for item in answer.output if item.type == "function_call"]
    for call in calls:
        assert call.status == "incomplete" or call.arguments == ARGUMENTS
    reason = "length" if answer.status == "incomplete" else "tool_calls"
    return answer.output_text, [call.arguments for call in calls], reason


def messages(clients: Clients, max_tokens: int, stream: bool) -> Seen:
    fields: Any = {"messages": HI, "tools": ANTHROPIC_TOOLS, "max_tokens": max_tokens}
    client = clients.anthropic
    answer: Any = client.messages.create(model="demo", stream=stream, **fields)
    if not stream:
        calls = [json.dumps(b.input) for b in answer.content if b.type == "tool_use"]
        text = "".join(b.text for b in answer.content if b.type == "text")
        assert [b.type for b in answer.content] == ["text", "tool_use"][: len(answer.content)]
        return text, calls, answer.stop_reason
    events = list(answer)
    kinds = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert kinds == ["text", "tool_use"][: len(kinds)]
    deltas = [e.delta for e in events if e.type == "content_block_delta"]
    text = "".join(d.text for d in deltas if d.type == "text_delta")
    written = "".join(d.partial_json for d in deltas if d.type == "input_json_delta")
    return text, [written][: len(kinds) - 1], events[-2].delta.stop_reason


ASKS: list[Ask] = [chats, responses, messages]


@pytest.mark.alike
@pytest.mark.parametrize(
    "every", [3, pytest.param(1, marks=pytest.mark.slow)], ids="every_{}".format
)
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cuts_off_is_emitted_once(
    scripted: ScriptedServer, clients: Clients, ask: Ask, stream: bool, every: int
) -> None:
    """Each API, and each way to stream, at other places than the next: together at all."""
    whole = json.loads(ARGUMENTS)
    seen = set()
    first = 6 + (ASKS.index(ask) + stream) % every
    for max_tokens in range(first, len(scripted.script._encode(SAID)), every):
        with scripted.says(SAID):
            text, calls, reason = ask(clients, max_tokens, stream)
        seen.add(bool(calls))
        if not calls:
            continue
        assert text == "I look."
        assert reason in ("length", "max_tokens")
        (arguments,) = calls
        if ask is messages and not stream:  # an object, as far as it came
            assert {key: whole[key] for key in json.loads(arguments)}.keys() <= whole.keys()
        else:
            assert ARGUMENTS.startswith(arguments)
    assert seen == {False, True}


ITEMS = TEMPLATE.replace(
    "{{ c.function | tojson }}", "{% for k, v in c.function.arguments.items() %}{{ v }}{% endfor %}"
)
CUT = '{"city": "Par'


@pytest.fixture(scope="module", params=["one object", "each argument by itself"])
def shown(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    template = TEMPLATE if request.param == "one object" else ITEMS
    with ScriptedServer(template) as shown:
        yield shown


def test_arguments_of_earlier_calls_may_be_any_text(shown: ScriptedServer) -> None:
    odd = ["{", "[]", "", '{"a": ' + "9" * 900 + "}", '{"a":' * 99 + "1" + "}" * 99]
    for arguments in odd:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "c", "type": "function", "function": function}
        history = [{"role": "assistant", "tool_calls": [call]}, *HI]
        item = {"type": "function_call", "call_id": "c", **function}
        items = [item, {"role": "user", "content": ""}]
        for path, body in ((CHAT, {"messages": history}), ("/v1/responses", {"input": items})):
            with shown.says("x"):
                answer = shown.post(path, {**body, "model": "demo"})
            assert answer.status_code == 200, (arguments, answer.text)


def test_a_history_with_a_cut_call_is_shown_as_it_was_written(shown: ScriptedServer) -> None:
    function = {"name": "get_weather", "arguments": CUT}
    call = {"id": "c", "type": "function", "function": function}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no JSON"},
    ]
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "no JSON"},
    ]
    for path, body in ((CHAT, {"messages": history}), ("/v1/responses", {"input": items})):
        with shown.says("x"):
            answer = shown.post(path, {**body, "model": "demo"})
            assert answer.status_code == 200, answer.text
            assert "Par" in shown.prompt
            assert "no JSON" in shown.prompt


def test_a_forced_call_that_is_cut_before_its_name_is_no_text(scripted: ScriptedServer) -> None:
    body = {"messages": HI, "tools": CHAT_TOOLS[:1], "tool_choice": "required"}
    for said in ("<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "get_w'):
        with scripted.says(said):
            events = [e for e in scripted.events(CHAT, body) if e != "[DONE]"]
            message = scripted.post(CHAT, body).json()["choices"][0]["message"]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert not "".join(delta.get("content") or "" for delta in deltas), said
        assert not message["content"], said
