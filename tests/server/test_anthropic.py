"""Anthropic's API, as its own client library sees it."""

# mypy: disable-error-code="union-attr"

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from live_server import LiveServer
from scripted import ScriptedServer, taught
from sdk_clients import CALLS, CITY, HELLO, NOW, WEATHER, anthropic_client, client_fixture, strictly

from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.slots import RegistryEntry, ServedModel

TOOLS: Any = [
    {"name": "get_weather", "description": "The weather", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
SAMPLING = ("temperature", "top_p", "top_k")


client = client_fixture("scripted", anthropic_client)
demo = client_fixture("live", anthropic_client)
BILLED = "x-anthropic-billing-header: cc_version=2.1.250.{0}; cc_entrypoint=cli; cch={0};"


def ask(client: Any, **fields: Any) -> Any:
    """The library of today has no arguments for sampling any more; the API has its fields."""
    extra = {name: fields.pop(name) for name in SAMPLING if name in fields}
    given = {"model": "demo", "max_tokens": 100, "messages": HELLO, **fields}
    extra.update(given.pop("extra_body", {}))
    return client.messages.create(**given, extra_body=extra)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_an_answer_is_a_message_of_the_library(demo: anthropic.Anthropic) -> None:
    answer = ask(demo, max_tokens=12, temperature=0, system="Be brief.", top_k=5, top_p=0.9)
    strictly(Message, answer)
    assert [block.type for block in answer.content] == ["text"]
    again = ask(demo, max_tokens=4, temperature=0)
    assert again.content[0].text == "Hello! I am"
    assert again.stop_reason == "max_tokens"
    assert again.usage.output_tokens == 4
    again = ask(demo, max_tokens=12, temperature=0, system="Be brief.")
    assert again.content == answer.content
    assert again.usage.cache_read_input_tokens > 0
    total = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == total


def test_a_stream_says_what_an_answer_says(demo: anthropic.Anthropic) -> None:
    whole = ask(demo, temperature=0)
    with demo.messages.stream(
        model="demo", max_tokens=100, messages=HELLO, extra_body={"temperature": 0}
    ) as stream:
        streamed = stream.get_final_message()
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_tokens_are_counted(demo: anthropic.Anthropic) -> None:
    count = demo.messages.count_tokens(model="demo", messages=HELLO)
    strictly(MessageTokensCount, count)
    usage = ask(demo, max_tokens=1).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    longer = demo.messages.count_tokens(model="demo", messages=HELLO, system="Be brief.")
    assert longer.input_tokens > count.input_tokens


def test_the_request_id_is_where_the_library_looks_for_it(server: LiveServer) -> None:
    for body in ({"messages": HELLO, "max_tokens": 1}, {}):
        headers = server.post("/v1/messages", body).headers
        assert headers["request-id"] == headers["x-request-id"]


def test_a_stop_sequence_ends_the_answer_and_is_named(demo: anthropic.Anthropic) -> None:
    answer = ask(demo, stop_sequences=["demo", "zzz"], temperature=0)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "demo")
    assert answer.content[0].text == "Hello! I am the "


def test_a_prefill_is_gone_on_with(demo: anthropic.Anthropic) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello! I am the"}]
    answer = ask(demo, messages=messages, temperature=0, max_tokens=4)
    assert answer.content[0].text.strip().startswith("demo model")


def test_blocks_in_their_order(client: anthropic.Anthropic, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}\n{NOW}", cached_tokens=3):
        answer = ask(client, tools=TOOLS)
    strictly(Message, answer)
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[0].thinking == "hm"
    assert answer.content[1].text == "I look."
    assert calls_of(answer) == CALLS
    assert answer.stop_reason == "tool_use"
    assert answer.usage.cache_read_input_tokens == 3


def test_the_events_of_a_stream(client: anthropic.Anthropic, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}\n{NOW}"):
        events = list(ask(client, tools=TOOLS, stream=True))
    for event in events:
        strictly(RawMessageStreamEvent, event)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [(e.type, e.index) for e in events if "block" in e.type]
    open_: int | None = None
    for kind, index in blocks:  # one block at a time, numbered from 0
        if kind == "content_block_start":
            assert open_ is None
            open_ = index
        assert index == open_
        if kind == "content_block_stop":
            open_ = None
    starts = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [e.delta.type for e in events if e.type == "content_block_delta"]
    assert set(deltas) == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    assert deltas.index("signature_delta") == deltas.index("text_delta") - 1
    assert deltas.count("input_json_delta") > 4
    assert events[-2].delta.stop_reason == "tool_use"


def test_thoughts_may_be_left_out(client: anthropic.Anthropic, scripted: ScriptedServer) -> None:
    given: Any = {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 50}
    with scripted.says("<think>hm</think>Yes."):
        whole = ask(client, **given)
        with client.messages.stream(model="demo", messages=HELLO, **given) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[0].thinking == ""
        assert answer.content[0].signature


def test_a_conversation_with_tools(client: anthropic.Anthropic, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}"):
        first = ask(client, tools=TOOLS)
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[-1].id,
        "content": [{"type": "text", "text": "no such city"}],
        "is_error": True,
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    with scripted.says("Sorry."):
        last = ask(client, messages=messages, tools=TOOLS, system=[{"type": "text", "text": "S"}])
        prompt = scripted.prompt
    assert "system\nS<|im_end|>" in prompt
    assert "<think>hm</think>I look.<tool_call>" in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Zürich 🙂"}}' in prompt
    assert "tool\nError: no such city<|im_end|>\n<|im_start|>user\nGo on." in prompt
    assert last.content[0].text == "Sorry."


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"type": "auto"}, CALLS),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALLS[:1]),
        ({"type": "none"}, []),
    ],
)
def test_each_tool_choice_shows_its_tools_and_calls(
    client: anthropic.Anthropic, scripted: ScriptedServer, choice: Any, found: Any
) -> None:
    with scripted.says(f"{WEATHER}\n{NOW}"):
        answer = ask(client, tools=TOOLS, tool_choice=choice)
    assert calls_of(answer) == found
    assert answer.stop_reason == ("tool_use" if found else "end_turn")


def test_a_call_can_be_forced() -> None:
    """The question fits no tool; a grammar makes the demo call one."""
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
    tools = [{"name": "get_weather", "input_schema": city}, TOOLS[1]]
    single = {"disable_parallel_tool_use": True}
    named = {"type": "tool", "name": "now", **single}
    with taught() as server, anthropic_client(server) as client:
        answer = ask(client, tools=tools, tool_choice={"type": "any", **single})
        events = list(ask(client, tools=tools, tool_choice=named, stream=True))
    assert answer.stop_reason == "tool_use"
    assert {name for name, _ in calls_of(answer)} <= {"get_weather", "now"}
    blocks = [e.content_block for e in events if e.type == "content_block_start"]
    assert [block.type for block in blocks] == ["tool_use"]
    assert blocks[0].name == "now"


def test_anthropics_tools_are_called(scripted: ScriptedServer, client: anthropic.Anthropic) -> None:
    view = {"command": "view", "path": "/a"}
    for kind, name, given in (
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", view),
        ("memory_20250818", "memory", view),
    ):
        said = json.dumps({"name": name, "arguments": given})
        with scripted.says(f"<tool_call>{said}</tool_call>"):
            answer = ask(client, tools=[{"type": kind, "name": name}])
            assert '"command"' in scripted.prompt
        (block,) = answer.content
        assert (block.name, block.input) == (name, given)


def test_errors_have_the_librarys_classes(demo: anthropic.Anthropic) -> None:
    for ask_for in (partial(ask, demo, model="claude"), partial(demo.models.retrieve, "no/such")):
        with pytest.raises(anthropic.NotFoundError) as caught:
            ask_for()
        assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        ask(demo, max_tokens=0)


NAMES = ["one", "two", "three"]
VERSION = {"anthropic-version": "2023-06-01"}


class ThreeModels(LiveServer):
    """None of them can be loaded, and none is asked to be."""

    def __init__(self) -> None:
        entries = [RegistryEntry(name=name, load=self.refuse) for name in NAMES]
        self.listen(ModelRegistry(entries, limit_bytes=10**9))

    def refuse(self, room_bytes: int) -> ServedModel:
        raise AssertionError("no answer was asked for")


@pytest.fixture(scope="module")
def lazy() -> Iterator[LiveServer]:
    with ThreeModels() as server:
        yield server


@pytest.fixture
def models_client(lazy: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(lazy) as client:
        yield client


def test_a_model_is_shown_with_its_context(live: LiveServer) -> None:
    with anthropic_client(live) as models_client:
        model = models_client.models.retrieve("demo")
    assert model.created_at.timestamp() == 1
    assert (model.max_input_tokens, model.max_tokens) == (
        live.model.session.limits.max_context,
    ) * 2


def test_models_are_listed_in_pages(models_client: anthropic.Anthropic) -> None:
    page = models_client.models.list()
    assert (page.first_id, page.last_id, page.has_more) == ("one", "three", False)
    assert {(model.lifecycle, model.type) for model in page.data} == {("active", "model")}
    assert [model.display_name for model in page.data] == NAMES
    for limit in (1, 2, 3):
        assert [model.id for model in models_client.models.list(limit=limit)] == NAMES
    assert [model.id for model in models_client.beta.models.list().data] == NAMES
    page = models_client.models.list(before_id="three", limit=1)
    assert ([model.id for model in page.data], page.has_more) == (["two"], True)
    assert [model.id for model in page.get_next_page().data] == ["one"]
    assert models_client.models.list(before_id="one").data == []
    assert models_client.models.list(lifecycle=["retired"]).data == []
    assert len(models_client.models.list(lifecycle=["active", "retired"]).data) == len(NAMES)


def test_wrong_pages_of_models_are_refused(lazy: LiveServer) -> None:
    for query in ("limit=0", "limit=1001", "limit=x", "after_id=x", "after_id=one&before_id=two"):
        answer = lazy.get(f"/v1/models?{query}", headers=VERSION)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert lazy.get(f"/v1/models?{query}").status_code == 200  # OpenAI's has no pages


def test_without_a_key_the_error_is_theirs_too() -> None:
    with LiveServer(keys=ApiKeys.from_plain(["sk-test-1"])) as server:
        answer = server.get("/v1/models", headers=VERSION)
        assert (answer.status_code, answer.json()["type"]) == (401, "error")
        assert "type" not in server.get("/v1/models").json()
        with anthropic_client(server).with_options(api_key="sk-test-1") as models_client:
            assert models_client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize("whole", [False, True])
def test_claude_codes_billing_line_is_left_out(scripted: ScriptedServer, whole: bool) -> None:
    """And nothing else is left out: a line further down that begins so stays."""
    prompts = []
    for mark in ("a1b2c", "9f0e1"):
        line, rules = BILLED.format(mark), "Rules.\n" + BILLED.format("x")
        parts = [{"type": "text", "text": text} for text in (line, rules)]
        body = {
            "messages": HELLO,
            "max_tokens": 5,
            "system": f"{line}\n{rules}" if whole else parts,
        }
        with scripted.says("x"):
            assert scripted.post("/v1/messages", body).status_code == 200
            prompts.append(scripted.prompt)
    assert prompts[0] == prompts[1]
    assert "Rules.\n" + BILLED.format("x") in prompts[0]
    assert "cch=a1b2c" not in prompts[0]


def test_a_prompt_that_is_too_long_says_how_long_it_is(live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 20_000}], "max_tokens": 5}
    counted = live.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    said = live.post("/v1/messages", body).json()["error"]["message"]
    assert said == f"prompt is too long: {counted} tokens > 2047 maximum"
