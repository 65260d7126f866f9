"""Anthropic's API, as its own client library sees it."""

# mypy: disable-error-code="union-attr"

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from live_server import LiveServer
from scripted import TEMPLATE, THOUGHT, ScriptedServer, teach
from sdk_clients import CALLS, CITY, HELLO, NOW, WEATHER, anthropic_client, strictly

from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.models import ModelRegistry
from mlxinfer.server.slots import RegistryEntry, ServedModel
from tests.waiting import wait_until

TOOLS: Any = [
    {"name": "get_weather", "description": "The weather", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
SAMPLING = ("temperature", "top_p", "top_k")


@pytest.fixture
def demo(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(server) as client:
        yield client


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(scripted) as client:
        yield client
    scripted.check_idle()


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


def test_a_stop_sequence(demo: anthropic.Anthropic) -> None:
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


def test_neighbours_of_one_role_are_one_turn(
    client: anthropic.Anthropic, scripted: ScriptedServer
) -> None:
    turns = [{"role": "user", "content": text} for text in ("one", "two")]
    with scripted.says("x"):
        ask(client, messages=[*turns, {"role": "system", "content": "rule"}, turns[0]])
        prompt = scripted.prompt
    assert "user\none\n\ntwo<|im_end|>" in prompt
    assert "system\nrule<|im_end|>" in prompt


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
    with ToolServer() as server, anthropic_client(server) as client:
        answer = ask(client, tools=tools, tool_choice={"type": "any", **single})
        events = list(ask(client, tools=tools, tool_choice=named, stream=True))
    assert answer.stop_reason == "tool_use"
    assert {name for name, _ in calls_of(answer)} <= {"get_weather", "now"}
    blocks = [e.content_block for e in events if e.type == "content_block_start"]
    assert [block.type for block in blocks] == ["tool_use"]
    assert blocks[0].name == "now"


class ToolServer(LiveServer):
    """The demo model with a template that knows tools."""

    def __init__(self) -> None:
        super().__init__()
        teach(self.model, TEMPLATE.replace(THOUGHT, ""))

    def check_idle(self) -> None:
        wait_until(self.is_idle)


SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
SEARCHED: Any = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "x", "url": "u"}]},
    {"type": "text", "text": "Found."},
]


@pytest.mark.parametrize("stream", [False, True])
def test_hosted_tools_and_their_blocks_are_skipped_and_named(
    scripted: ScriptedServer, stream: bool
) -> None:
    turns = [*HELLO, {"role": "assistant", "content": SEARCHED}, *HELLO]
    tools = [*TOOLS, SEARCH, {"type": "computer_toolset_20260801"}]
    body = {"messages": turns, "max_tokens": 5, "tools": tools, "stream": stream}
    with scripted.says("x"):
        answer = scripted.post("/v1/messages", body)
        assert "get_weather" in scripted.prompt
        assert "web_search" not in scripted.prompt
        assert "Found." in scripted.prompt
    assert answer.status_code == 200, answer.text
    first = len(TOOLS)
    assert answer.headers["x-mlxinfer-skipped"] == (
        f"tools[{first}] web_search_20250305, tools[{first + 1}] computer_toolset_20260801, "
        "messages[1].content[0] server_tool_use, messages[1].content[1] web_search_tool_result"
    )


def test_tools_of_anthropics_schemas_are_called(
    scripted: ScriptedServer, client: anthropic.Anthropic
) -> None:
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


def test_what_changes_nothing_is_taken(scripted: ScriptedServer) -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    fields = {"metadata": {"user_id": "u"}, "context_management": keep, "service_tier": "auto"}
    message = {"role": "user", "content": [block]}
    body = {"messages": [message], "max_tokens": 5, "system": [block], **fields}
    with scripted.says("x"):
        assert scripted.post("/v1/messages?beta=true", body).status_code == 200


def test_errors_have_the_librarys_classes(demo: anthropic.Anthropic) -> None:
    for ask_for in (lambda: ask(demo, model="claude"), lambda: demo.models.retrieve("no/such")):
        with pytest.raises(anthropic.NotFoundError) as caught:
            ask_for()
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
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


def test_a_model_is_shown(live: LiveServer) -> None:
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


def test_pages_that_are_none(lazy: LiveServer) -> None:
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


BILLED = "x-anthropic-billing-header: cc_version=2.1.250.{0}; cc_entrypoint=cli; cch={0};"


@pytest.mark.parametrize("whole", [False, True])
def test_the_line_that_claude_code_changes_is_no_part_of_the_prompt(
    scripted: ScriptedServer, whole: bool
) -> None:
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


PIXEL = (  # a PNG of one
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}


def test_pictures_of_earlier_turns_do_not_end_a_conversation(scripted: ScriptedServer) -> None:
    """A model that reads text is told of them; one in the newest message is an error."""
    call = {"type": "tool_use", "id": "t1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [PICTURE]}
    answered = [
        {"role": "user", "content": [{"type": "text", "text": "Look."}, PICTURE]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    ended = [*answered, {"role": "assistant", "content": "I see."}, *HELLO]
    for messages in (answered, ended):
        with scripted.says("x"):
            answer = scripted.post("/v1/messages", {"messages": messages, "max_tokens": 5})
            assert answer.status_code == 200, answer.text
            assert scripted.prompt.count("[A picture was here. This model reads text only.]") == 2
        assert answer.headers["x-mlxinfer-skipped"] == (
            "messages[0].content[1].source.data picture, "
            "messages[2].content[0].content[0].source.data picture"
        )
    newest = {"messages": [*HELLO, answered[1], answered[0]], "max_tokens": 5}
    assert scripted.post("/v1/messages", newest).status_code == 400


def test_what_only_other_servers_know_is_left_out_and_named(scripted: ScriptedServer) -> None:
    thought = {"type": "redacted_thinking", "data": "x"}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "Found."}]}
    later = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    body = {
        "messages": [*HELLO, answer, *HELLO],
        "max_tokens": 5,
        "tools": [later],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    with scripted.says("x"):
        answered = scripted.post("/v1/messages", body)
        assert answered.status_code == 200, answered.text
        assert "Found." in scripted.prompt
        assert "later" in scripted.prompt
    assert answered.headers["x-mlxinfer-skipped"] == (
        "tools[0] defer_loading, context_management edits, messages[1].content[0] redacted_thinking"
    )


REFERENCE = {"type": "tool_reference", "tool_name": "Bash"}
OF_THE_MODEL: dict[str, dict[str, Any]] = {
    "unknown": {"type": "mystery", "x": 1},
    "found tools": {
        "type": "tool_search_tool_result",
        "tool_use_id": "s",
        "content": {"type": "tool_search_tool_search_result", "tool_references": [REFERENCE]},
    },
}


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_unknown_blocks_of_an_earlier_answer_are_skipped(name: str, live: LiveServer) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}, OF_THE_MODEL[name]]}
    reply = live.post("/v1/messages", {"messages": [*HELLO, answer, *HELLO], "max_tokens": 2})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-mlxinfer-skipped"].startswith("messages[1].content[1]")


def test_a_reference_to_a_tool_is_a_note(scripted: ScriptedServer) -> None:
    call = {"type": "tool_use", "id": "t", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [REFERENCE]}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with scripted.says("x"):
        answer = scripted.post("/v1/messages", {"messages": turns, "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        assert "[tool Bash]" in scripted.prompt
    assert answer.headers["x-mlxinfer-skipped"].endswith("tool_reference")


def test_a_prompt_that_is_too_long_says_how_long_it_is(live: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 20_000}], "max_tokens": 5}
    counted = live.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    said = live.post("/v1/messages", body).json()["error"]["message"]
    assert said == f"prompt is too long: {counted} tokens > 2047 maximum"
