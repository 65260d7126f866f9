"""OpenAI's responses API, as its own client library sees it."""

# mypy: disable-error-code="union-attr"

import base64
import json
import re
from typing import Any

import openai
import pytest
from live_server import CHAT, LiveServer, chat
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel
from scripted import TOOLS_ONLY, ScriptedServer, taught
from sdk_clients import CALLS, FUNCTION, NOW, WEATHER, openai_client, strictly

from mlxinfer.outputs import CallStatus, ReasoningPart, TextPart, ToolCallDelta
from mlxinfer.server.apis.responses_items import OutputItems

TOOLS: Any = [
    {"type": "function", **FUNCTION, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": True},
]
LONG: Any = {"type": "array", "items": {"type": "integer"}, "minItems": 500}


def ask(client: Any, **fields: Any) -> Any:
    return client.responses.create(**{"model": "demo", "input": "Hello", **fields})


def calls_of(response: Any) -> list[tuple[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [(call.name, json.loads(call.arguments)) for call in calls]


def test_an_answer_is_a_response_of_the_library(demo: openai.OpenAI) -> None:
    answer = ask(demo, temperature=0, max_output_tokens=4, metadata={"a": "b"}, user="u")
    strictly(Response, answer)
    assert answer.output_text == "Hello! I am"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 4
    assert answer.metadata == {"a": "b"}
    whole = ask(demo, temperature=0, instructions="Be brief.")
    strictly(Response, whole)
    assert whole.status == "completed"
    assert whole.instructions == "Be brief."


def test_an_answer_in_a_form(demo: openai.OpenAI) -> None:
    class Person(BaseModel):
        age: int
        tall: bool

    answer = demo.responses.parse(
        model="demo", input="Hello", text_format=Person, temperature=0, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, Person)


def test_items_in_their_order(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}\n{NOW}", cached_tokens=3):
        answer = ask(client, tools=TOOLS, include=["reasoning.encrypted_content"])
    strictly(Response, answer)
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "hm"
    assert base64.b64decode(answer.output[0].encrypted_content) == b"hm"
    assert answer.output_text == "I look."
    assert calls_of(answer) == CALLS
    assert answer.status == "completed"
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert [tool.strict for tool in answer.tools] == [False, True]


def test_the_events_of_a_stream(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}\n{NOW}"):
        events = list(ask(client, tools=TOOLS, stream=True))
    for event in events:
        strictly(ResponseStreamEvent, event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    added = [e.item for e in events if e.type == "response.output_item.added"]
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done]
    assert [item.type for item in done] == ["reasoning", "message", *["function_call"] * 2]
    assert events[-1].response.output == done
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    finals = [e for e in events if e.type == "response.function_call_arguments.done"]
    for final in finals:
        assert final.arguments == "".join(d.delta for d in deltas if d.item_id == final.item_id)
    assert [final.name for final in finals] == [name for name, _ in CALLS]
    assert len(deltas) > 4


def test_the_stream_helper_accumulates(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    given: Any = {"model": "demo", "input": "x", "tools": [TOOLS[0]]}
    text = f"<think>hm</think>I look.\n{WEATHER}\n{WEATHER}"
    with scripted.says(text), client.responses.stream(**given) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert calls_of(final) == [CALLS[0]] * 2
    assert final.output_text == "I look."


def test_a_call_that_breaks_is_no_item(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    """A stream has begun to tell of it by then; what is left at the end is none the less whole."""
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": "a" oops}}</tool_call>'
    with scripted.says(f"I look.\n{broken}"):
        whole = ask(client, tools=TOOLS)
        *_, last = ask(client, tools=TOOLS, stream=True)
    for answer in (whole, last.response):
        assert {item.type for item in answer.output} == {"message"}
        assert "oops" in answer.output_text


def test_tokens_of_reasoning_are_counted(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    thought, said = "<think>one two three", "</think>four five"
    ids = scripted.model.tokenizer.encode(thought, parse_special=True, add_special_tokens=False)
    with scripted.says(thought + said):
        usage = ask(client).usage
    assert len(ids) <= usage.output_tokens_details.reasoning_tokens <= len(ids) + 2
    assert usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_conversation_with_tools(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(f"<think>hm</think>I look.\n{WEATHER}\n{NOW}"):
        first = ask(client, tools=TOOLS, include=["reasoning.encrypted_content"])
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    del items[1]["content"]  # some clients keep reasoning in its wrapping only
    for call in first.output[2:]:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    items.append({"role": "developer", "content": "Be brief."})
    with scripted.says("Fine."):
        last = ask(client, input=items, tools=TOOLS, instructions="Rule.")
        prompt = scripted.prompt
    assert "system\nRule.<|im_end|>" in prompt
    assert "assistant\n<think>hm</think>I look.<tool_call>" in prompt
    assert prompt.count('{"name": "now", "arguments": {}}\n</tool_call><|im_end|>') == 1
    assert prompt.count("tool\n5<|im_end|>") == 2
    assert "system\nBe brief." in prompt
    assert last.output_text == "Fine."


def test_the_oldest_turns_may_go(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    long = "word " * 300
    turns: Any = [{"role": "system", "content": "Be brief."}]
    for number in range(12):
        turns += [
            {"role": "user", "content": f"Question {number} {long}"},
            {"role": "assistant", "content": "Yes."},
        ]
    turns.append({"role": "user", "content": "The last one"})
    with scripted.says("Fine."):
        with pytest.raises(openai.BadRequestError):
            ask(client, input=turns)
        answer = ask(client, input=turns, truncation="auto")
        prompt = scripted.prompt
    assert (answer.truncation, answer.output_text) == ("auto", "Fine.")
    assert "Be brief." in prompt
    assert "The last one" in prompt
    assert "Question 0 " not in prompt
    only = [{"role": "user", "content": long * 20}]
    with pytest.raises(openai.BadRequestError):
        ask(client, input=only, truncation="auto")


def test_an_interrupted_stream_fails() -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": LONG}}
    with LiveServer() as server, openai_client(server) as client:
        events = iter(ask(client, text=form, stream=True))
        while next(events).type != "response.output_text.delta":
            pass
        server.model.session.engine.close()
        *_, last = events
        strictly(ResponseStreamEvent, last)
    assert last.type == "response.failed"
    assert "closed" in last.response.error.message


def test_log_probabilities_of_the_text(demo: openai.OpenAI, server: LiveServer) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(demo, temperature=0, max_output_tokens=5, **fields)
    strictly(Response, answer)
    (part,) = answer.output[0].content
    assert "".join(logprob.token for logprob in part.logprobs) == part.text
    assert all(len(logprob.top_logprobs) == 2 for logprob in part.logprobs)
    body = chat("Hello", max_tokens=5, logprobs=True, top_logprobs=2)
    chosen = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert [logprob.logprob for logprob in part.logprobs] == [
        logprob["logprob"] for logprob in chosen
    ]
    events = list(ask(demo, temperature=0, max_output_tokens=5, stream=True, **fields))
    for event in events:
        strictly(ResponseStreamEvent, event)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert [x.logprob for d in deltas for x in d.logprobs] == [x.logprob for x in part.logprobs]


def test_tokens_of_reasoning_and_calls_have_no_log_probabilities() -> None:
    score = {"token": "x", "bytes": [120], "logprob": -1.0, "top_logprobs": []}
    items = OutputItems("a", wrap=False, declared={})
    call = ToolCallDelta(index=0, id="c", name="f", arguments="{}", status=CallStatus.DONE)
    steps: list[tuple[Any, int]] = [
        ((), 1),  # <think>
        ((ReasoningPart("hm"),), 1),
        ((), 1),  # </think>
        ((), 0),
        ((TextPart("a"),), 1),
        ((), 1),  # half a character
        ((TextPart("é"),), 1),
        ((call,), 1),
    ]
    for parts, count in steps:
        assert all(items.push(parts, [score] * count))
    assert all(items.close("completed"))
    texts = [item for item in items.done if item["type"] == "message"]
    assert [len(item["content"][0]["logprobs"]) for item in texts] == [3]


PATCH_GRAMMAR = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line  // a comment

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-x\n+y\n*** End Patch\n"
SCHEMA: Any = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
SHELL: Any = {"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False}
NOTES: Any = {"type": "custom", "name": "notes", "description": "Keeps a note."}
APPLY_PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
DOCS: Any = {
    "type": "namespace",
    "name": "mcp__docs__",
    "description": "Documents",
    "tools": [{"type": "function", "name": "search", "parameters": SCHEMA}],
}
HOSTED: Any = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "tool_search"}]
ALL_TOOLS: Any = [SHELL, *HOSTED, APPLY_PATCH, NOTES, DOCS]

AS_XML = TOOLS_ONLY.replace("<tool_call>{name", "<tool_call>\n<function=f>\n<parameter=p>{name")


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("name", ["input", "patch"])
def test_a_custom_tool_is_called_with_plain_text(
    client: openai.OpenAI, scripted: ScriptedServer, name: str
) -> None:
    text = PATCH.replace("\n", "\\n")
    with scripted.says("I edit." + calling("apply_patch", f'{{"{name}": "{text}"}}')):
        answer = client.responses.create(model="demo", input="Hi", tools=ALL_TOOLS)
        events = list(
            client.responses.create(model="demo", input="Hi", tools=ALL_TOOLS, stream=True)
        )
    strictly(Response, answer)
    for event in events:
        strictly(ResponseStreamEvent, event)
    last: Any = events[-1]
    for output in (answer.output, last.response.output):
        (call,) = [item for item in output if item.type == "custom_tool_call"]
        assert (call.name, call.input, call.namespace) == ("apply_patch", PATCH, None)
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.done" in kinds
    assert "response.function_call_arguments.delta" not in kinds
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH


def test_tools_of_namespaces_are_called(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    with scripted.says(calling("mcp__docs__search", '{"cmd": "x"}')):
        answer = client.responses.create(model="demo", input="Hi", tools=ALL_TOOLS)
    strictly(Response, answer)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("mcp__docs__", "search")


@pytest.mark.parametrize("template", [TOOLS_ONLY, AS_XML], ids=["json", "xml"])
def test_the_input_of_a_custom_tool_keeps_to_its_expression(template: str) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}
    tool = {"type": "custom", "name": "mark", "format": form}
    body: Any = {"input": "Hi", "tools": [tool], "max_output_tokens": 200}
    body["tool_choice"] = {"type": "custom", "name": "mark"}
    with taught(template) as server:
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
    assert "x-mlxinfer-skipped" not in answer.headers
    call = answer.json()["output"][-1]
    assert call["type"] == "custom_tool_call", answer.text
    assert re.fullmatch("[ab]{3}", call["input"]), call
