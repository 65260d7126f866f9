"""A tool call that max_tokens cuts off: the partial call alone, in every API, streamed or not."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from live_server import CHAT
from scripted import TEMPLATE, ScriptedServer
from sdk_clients import anthropic_client, openai_client

HI = [{"role": "user", "content": "Hi"}]
ARGUMENTS = '{"city": "Paris, \\"rue\\" 7", "days": [1, 2, 3], "note": "a }] b"}'
SAID = f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
ANTHROPIC_TOOLS: Any = [{"name": "get_weather", "input_schema": SCHEMA}]


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


def chat(clients: Clients, max_tokens: int, stream: bool) -> Seen:
    fields: Any = {"messages": HI, "tools": CHAT_TOOLS, "max_tokens": max_tokens}
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


ASKS: list[Ask] = [chat, responses, messages]


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


def test_whole_members_of_a_cut_call_are_in_an_anthropic_block(
    scripted: ScriptedServer, clients: Clients
) -> None:
    found = []
    for max_tokens in range(6, len(scripted.script._encode(SAID))):
        with scripted.says(SAID):
            _, calls, _ = messages(clients, max_tokens, False)
        found += [json.loads(call) for call in calls]
    assert {} in found
    assert json.loads(ARGUMENTS) in found
    assert any(each.get("days") == [1, 2] for each in found)
    assert any(each.get("city") == "Paris" for each in found)


ITEMS = TEMPLATE.replace(
    "{{ c.function | tojson }}", "{% for k, v in c.function.arguments.items() %}{{ v }}{% endfor %}"
)
CUT = '{"city": "Par'


@pytest.fixture(scope="module", params=["one object", "each argument by itself"])
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    template = TEMPLATE if request.param == "one object" else ITEMS
    with ScriptedServer(template) as server:
        yield server


ODD = ["{", "[]", "", '{"a": ' + "9" * 900 + "}", '{"a":' * 99 + "1" + "}" * 99]


@pytest.mark.parametrize("arguments", ODD, ids=lambda text: text[:12])
def test_arguments_of_earlier_calls_may_be_any_text(server: ScriptedServer, arguments: str) -> None:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    history = [{"role": "assistant", "tool_calls": [call]}, *HI]
    items = [{"type": "function_call", "call_id": "c", **function}, {"role": "user", "content": ""}]
    for path, body in ((CHAT, {"messages": history}), ("/v1/responses", {"input": items})):
        with server.says("x"):
            answer = server.post(path, {**body, "model": "demo"})
        assert answer.status_code == 200, answer.text


def test_a_history_with_a_cut_call_is_shown_as_it_was_written(server: ScriptedServer) -> None:
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
        with server.says("x"):
            answer = server.post(path, {**body, "model": "demo"})
            assert answer.status_code == 200, answer.text
            assert "Par" in server.prompt
            assert "no JSON" in server.prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said", ["<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "get_w']
)
def test_a_forced_call_that_is_cut_before_its_name_is_no_text(
    scripted: ScriptedServer, said: str, stream: bool
) -> None:
    body = {"messages": HI, "tools": CHAT_TOOLS, "tool_choice": "required", "stream": stream}
    with scripted.says(said):
        if stream:
            events = [e for e in scripted.events(CHAT, body) if e != "[DONE]"]
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            assert not "".join(delta.get("content") or "" for delta in deltas)
        else:
            message = scripted.post(CHAT, body).json()["choices"][0]["message"]
            assert not message["content"]
