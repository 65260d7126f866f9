"""LLM.chat with tools: the demo model under a template that knows them, forced by a grammar."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from mlxinfer import LLM, SamplingParams
from mlxinfer.errors import InvalidRequestError, TemplateError
from mlxinfer.session.inputs import ChatInput
from mlxinfer.text import ChatTemplate, detect_tools

TEMPLATE = (
    "{% for t in tools %}{{ t | tojson }}<tool_call>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "Hello"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"name": "now"},
]
SHORT = SamplingParams(max_tokens=60)
CALLED = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-draft") as llm:
        yield llm


def under(llm: LLM, template: str, monkeypatch: pytest.MonkeyPatch) -> LLM:
    tokenizer, builder = llm.tokenizer, llm._session.builder
    monkeypatch.setattr(builder, "tool_format", builder.tool_format)  # of its own template
    monkeypatch.setattr(tokenizer, "template", ChatTemplate(template))
    builder.tool_format = detect_tools(tokenizer)
    return llm


@pytest.fixture
def knowing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return under(llm, TEMPLATE, monkeypatch)


@pytest.fixture
def unknowing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return under(llm, WITHOUT_TOOLS, monkeypatch)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {"additionalProperties": False},
        {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": False}]},
    ],
)
@pytest.mark.ci
def test_forced_arguments_are_an_object_whether_or_not_the_schema_says_so(
    knowing: LLM, parameters: dict[str, object]
) -> None:
    tools = [{"name": "f", "parameters": parameters}]
    for seed in range(12):
        params = SamplingParams(max_tokens=400, temperature=1.0, seed=seed)
        result = knowing.chat(HI, params, tools=tools, tool_choice="required")
        if result.finish_reason != "length":
            assert isinstance(json.loads(result.tool_calls[0].arguments), dict)
            return
    pytest.fail("no call came to its end")


def test_a_template_without_tools_gets_them_as_text(unknowing: LLM) -> None:
    result = unknowing.chat(HI, SamplingParams(max_tokens=8), tools=TOOLS)
    plain = unknowing.chat(HI, SamplingParams(max_tokens=8), tools=TOOLS, tool_choice="none")
    assert result.prompt_tokens > plain.prompt_tokens + 50
    assert plain.text.startswith("Hello")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=1)
    forced = unknowing.chat(HI, params, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    (call,) = forced.tool_calls
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), CITY)
    said = {"role": "assistant", "tool_calls": [{"id": "c", "function": CALLED}]}
    history = [*HI, said, {"role": "tool", "tool_call_id": "c", "content": "12 degrees"}]
    ids = unknowing._session.encode(ChatInput(messages=history, tools=TOOLS)).ids
    prompt = unknowing.tokenizer.decode(ids)
    assert "12 degrees" in prompt
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt


def test_a_named_format_needs_a_template_with_tools(unknowing: LLM, monkeypatch) -> None:
    named = detect_tools(unknowing.tokenizer, "hermes")
    monkeypatch.setattr(unknowing._session.builder, "tool_format", named)
    with pytest.raises(TemplateError, match="does not know tools"):
        unknowing.chat(HI, SHORT, tools=TOOLS)


def test_a_forced_call_is_the_whole_answer(knowing: LLM) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    result = knowing.chat(HI, SHORT, tools=TOOLS, tool_choice=choice)
    (call,) = result.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    assert result.text == ""
    assert result.to_dict()["tool_calls"] == [
        {"id": call.id, "name": call.name, "arguments": call.arguments, "complete": True}
    ]
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [_as_message(call)]},
        {"role": "tool", "tool_call_id": call.id, "content": "warm"},
    ]
    assert knowing.chat(history, SHORT, tools=TOOLS).finish_reason


def _as_message(call) -> dict:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def test_a_streamed_call_is_the_same_call(knowing: LLM) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    deltas = list(knowing.stream_chat(HI, SHORT, **options))
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    (call,) = deltas[-1].result.tool_calls
    assert "".join(piece.arguments for piece in pieces) == call.arguments
    assert (pieces[0].id, pieces[0].name) == (call.id, call.name)
    assert all(piece.id is None for piece in pieces[1:])
    assert [part for delta in deltas for part in delta.parts] == pieces


def test_tools_that_are_none_are_refused(knowing: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        knowing.chat(HI, SHORT, tools=[{"type": "web_search"}])
    with pytest.raises(InvalidRequestError, match="expected an object"):
        knowing.chat(HI, SHORT, tools="weather")  # type: ignore[arg-type]
    for tools in ((tool for tool in TOOLS), 5):
        with pytest.raises(InvalidRequestError, match="expected a list of tools"):
            knowing.chat(HI, SHORT, tools=tools)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="tool_format"):
        LLM("demo-draft", tool_format="morse")


def test_a_program_calls_tools_as_a_chat_does(llm: LLM) -> None:
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name. (choices: ["Oslo", "Rome"])
        """
        return f"{city}: rain"

    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "tools": [get_weather]}
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Oslo?"}]
    with llm.program(**params) as program:
        program.user("Weather in Oslo?")
        called = program.gen("call", **forced)
        (call,) = called.tool_calls
        assert called.token_ids == llm.chat(chat, **params, **forced).token_ids
        with pytest.raises(InvalidRequestError, match="no call 'other'"):
            program.tool(replace(call, id="other"), "sun")
        rain = get_weather(**json.loads(call.arguments))
        program.tool(call, rain)
        function = {"name": call.name, "arguments": call.arguments}
        made = {"id": call.id, "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": rain}
        chat += [{"role": "assistant", "content": called.text, "tool_calls": [made]}, result]
        assert program.messages == chat
        answer = program.gen("answer", tool_choice="none")
        assert answer.token_ids == llm.chat(chat, **params, tool_choice="none").token_ids
        streamed = [d.result for d in program.fork(1)[0].stream("more", tool_choice="none")]
        assert streamed[-1] is not None
