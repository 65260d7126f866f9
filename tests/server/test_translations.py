"""Bodies to inputs of the session, of every API: tables, without a server."""

import base64
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlxinfer.core import SamplingParams
from mlxinfer.errors import InvalidRequestError, OverloadedError, UnsupportedFieldError
from mlxinfer.server.apis import (
    anthropic,
    chat,
    completions,
    embeddings,
    ollama,
    responses,
    tokens,
    tools,
)
from mlxinfer.server.apis.responses_items import conversation
from mlxinfer.server.http import decode
from mlxinfer.session.inputs import ChatInput, TextInput
from tests.seeds import seeded

HELLO: Any = [{"role": "user", "content": "Hello"}]
MODEL: Any = SimpleNamespace(
    name="demo",
    defaults=SamplingParams(max_tokens=None, temperature=1.0),
    tokenizer=SimpleNamespace(encode=lambda text, **_: [ord(char) for char in text]),
)


def read_chat(**fields: Any) -> ChatInput:
    body = decode(json.dumps({"messages": HELLO, **fields}).encode(), chat.ChatRequest)
    return chat.read(body, MODEL, tools.DeclaredTools())


def read_text(**fields: Any) -> TextInput:
    body = json.dumps({"prompt": "Hello", **fields}).encode()
    return completions.read(decode(body, completions.CompletionRequest), MODEL)[0]


def read_response(**fields: Any) -> ChatInput:
    body = decode(json.dumps({"input": "Hello", **fields}).encode(), responses.ResponsesRequest)
    declared = tools.read_tools(body.tools)
    messages = conversation(body.instructions, [], body.items, declared.skipped)
    return responses.read(body, MODEL, messages, declared)


def read_messages(**fields: Any) -> ChatInput:
    given = {"messages": HELLO, "max_tokens": 5, **fields}
    body = decode(json.dumps(given).encode(), anthropic.MessagesRequest)
    return anthropic.read_messages(body, MODEL, [])


def read_ollama(**options: Any) -> ChatInput:
    given = {"model": "demo", "messages": HELLO, "options": options}
    body = decode(json.dumps(given).encode(), ollama.ChatAsk)
    result = ollama.read_chat(body, body.sampling(), [], MODEL)
    assert isinstance(result, ChatInput)
    return result


Read = Callable[..., Any]
READS: list[Read] = [read_chat, read_text, read_response, read_messages, read_ollama]
SAMPLERS: list[tuple[str, Any, str, Any]] = [
    ("repeat_penalty", 1.3, "repetition_penalty", 1.3),
    ("repeat_last_n", 5, "repetition_window", 5),
    ("penalty_last_n", 5, "repetition_window", 5),
    ("repetition_context_size", 5, "repetition_window", 5),
    ("min_new_tokens", 2, "min_tokens", 2),
    ("random_seed", 5, "seed", 5),
    ("typ_p", 0.9, "typical_p", 0.9),
    ("typical", 0.9, "typical_p", 0.9),
    ("temperature", 0.5, "temperature", 0.5),
    ("top_k", -1, "top_k", 0),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_n_sigma", -1, "top_n_sigma", 0.0),
    ("top_n_sigma", 1.5, "top_n_sigma", 1.5),
    ("xtc_probability", 0.5, "xtc_probability", 0.5),
    ("xtc_threshold", 0.2, "xtc_threshold", 0.2),
    ("dry_multiplier", 0.8, "dry_multiplier", 0.8),
    ("dry_sequence_breakers", ["\n", "x"], "dry_sequence_breakers", ("\n", "x")),
    ("logit_bias", [[5, 2], ["x", -1.5], [7, False]], "logit_bias", {5: 2, 120: -1.5, 7: -1e9}),
    ("logit_bias", {"5": 2}, "logit_bias", {5: 2}),
    ("presence_penalty", 0.5, "presence_penalty", 0.5),
    ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
    ("min_p", 0.05, "min_p", 0.05),
    ("seed", 7, "seed", 7),
    ("seed", -1, "seed", None),
    ("ignore_eos", True, "ignore_eos", True),
    ("stop_token_ids", [9], "stop_token_ids", (9,)),
    ("speculate", False, "speculate", False),
]
LIMITS: list[tuple[str, Any, str, Any]] = [
    ("num_predict", 7, "max_tokens", 7), ("n_predict", 7, "max_tokens", 7),
    ("max_new_tokens", 7, "max_tokens", 7), ("n_predict", -1, "max_tokens", None),
    ("max_tokens", -1, "max_tokens", None), ("stop_sequences", ["x", "y"], "stop", ("x", "y")),
    ("stop", "x", "stop", ("x",)), ("stop", ["x"] * 64, "stop", ("x",) * 64),
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_sampling_fields_count_under_any_of_their_names(read: Read) -> None:
    table = SAMPLERS + (LIMITS if read in (read_chat, read_text, read_ollama) else [])
    for field, value, name, expected in table:
        params = read(**{field: value}).params
        assert getattr(params, name) == expected, field
        assert read(**{field: None}).params == read().params, field
    assert read_ollama(num_predict=-2).params == read_ollama(num_predict=-1).params


SCHEMA: Any = {"type": "object", "properties": {"age": {"type": "integer"}}}
NAMED: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA}
FORMS: list[tuple[Read, dict[str, Any]]] = [
    (read_chat, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    (read_chat, {"format": SCHEMA}),
    (read_text, {"guided_json": SCHEMA}),
    (read_response, {"text": {"format": NAMED}}),
    (read_messages, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (read_messages, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
]


def test_every_api_has_a_field_for_the_form() -> None:
    specs = {(read(**fields).constraint.main, read().constraint) for read, fields in FORMS}
    assert len(specs) == 1


def test_ollamas_form_is_a_schema_or_json() -> None:
    for form in (SCHEMA, "json"):
        body = ollama.ChatAsk(model="demo", messages=[], format=form)
        assert body.input_fields(MODEL, body.sampling())["constraint"] is not None


def test_a_busy_server_is_overloaded_in_anthropics_words() -> None:
    content = json.loads(anthropic.ANTHROPIC.body(OverloadedError("full")))
    assert content["error"] == {"type": "overloaded_error", "message": "full"}


def refused(read: Read, fields: dict[str, Any], error: Any = InvalidRequestError) -> str:
    """The field that the error is about; of an unsupported one, its text says the name too."""
    with pytest.raises(error) as caught:
        read(**fields)
    param: str = caught.value.param
    assert error is not UnsupportedFieldError or param in str(caught.value)
    return param


@pytest.mark.parametrize("read", READS)
def test_two_names_of_one_field_must_agree(read: Read) -> None:
    two = {"repeat_penalty": 1.3, "repetition_penalty": 1.1}
    assert refused(read, two) == "repeat_penalty"
    assert read(repeat_penalty=1.3, repetition_penalty=1.3).params.repetition_penalty == 1.3
    assert read(cache_salt="a").cache_salt == "a"


@pytest.mark.parametrize("read", READS)
def test_fields_without_a_meaning_here_are_named(read: Read) -> None:
    without_meaning = {
        "no_repeat_ngram_size": (3, 0),
        "samplers": (["top_k"], []),
        "tfs_z": (0.9, 1.0),
        "mirostat": (2, 0),
        "mirostat_mode": (2, 0),
        "top_a": (0.2, 0.0),
        "num_beams": (4, 1),
        "guidance_scale": (1.5, 1),
        "do_sample": (False, True),
        "safe_prompt": (True, False),
        "lora": ([{"id": 0, "scale": 0.5}], []),
        "draft_model": ("x", None),
    }
    for name, (value, neutral) in without_meaning.items():
        assert refused(read, {name: value}, UnsupportedFieldError) == name
        assert read(**{name: neutral}) == read()


@pytest.mark.parametrize("read", [read_response, read_messages])
def test_fields_of_chat_are_named_in_other_apis(read: Read) -> None:
    fields: dict[str, Any] = {
        **{"num_predict": 5, "n_predict": 5, "max_new_tokens": 5, "format": "json"},
        **{"enable_thinking": False, "reasoning_budget": 0, "thinking_budget_tokens": 10},
        **{"guided_regex": "a", "ebnf": 'root ::= "a"', "stop": ["x"], "n": 2},
        "response_format": {"type": "json_object"},
    }
    for name, value in fields.items():
        assert refused(read, {name: value}, UnsupportedFieldError) == name
    plain = {"n": 1, "stop": [], "logprobs": False, "response_format": {"type": "text"}}
    assert read(**plain) == read()


SWITCHES: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({}, {}, None),
    ({"enable_thinking": False}, {"enable_thinking": False}, None),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
    ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}, None),
    ({"thinking": False}, {"enable_thinking": False}, None),
    ({"think": False}, {"enable_thinking": False}, None),
    ({"think": "high"}, {}, "high"),
    ({"reasoning": {"enabled": False}}, {"enable_thinking": False}, None),
    ({"reasoning": {"effort": "high"}}, {}, "high"),
    ({"reasoning_effort": "low"}, {}, "low"),
    ({"reasoning_budget": 0}, {"enable_thinking": False}, None),
    ({"reasoning_budget": -1}, {}, None),
]
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"enable_thinking": True, "thinking": False}, "thinking"),
    ({"think": True, "chat_template_kwargs": {"enable_thinking": False}}, "think"),
    ({"reasoning_budget": 100, "reasoning": {"max_tokens": 99}}, "reasoning.max_tokens"),
    ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
    ({"reasoning_budget": -2}, "reasoning_budget"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"reasoning_effort": "low", "think": "high"}, "think"),
    ({"think": "high", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
]


def test_reasoning_is_switched_by_any_name() -> None:
    for fields, variables, effort in SWITCHES:
        given = read_chat(**fields)
        assert (given.template_variables, given.reasoning_effort) == (variables, effort)


def test_contradictions_are_named() -> None:
    for fields, param in CONTRADICTIONS:
        assert refused(read_chat, fields) == param


def test_a_reasoning_budget_has_the_names_of_all_peers() -> None:
    budgets: list[dict[str, Any]] = [
        {"thinking": {"type": "enabled", "budget_tokens": 6}},
        {"reasoning": {"max_tokens": 6}},
        {"thinking_token_budget": 6, "reasoning_budget": 6},
        {"thinking_budget_tokens": 6},
    ]
    for fields in budgets:
        params = read_chat(**fields).params
        assert params is not None
        assert params.max_reasoning_tokens == 6
    thinking = {"type": "enabled", "budget_tokens": 1024}
    params = read_messages(max_tokens=1500, thinking=thinking).params
    assert params is not None
    assert params.max_reasoning_tokens == 1024


def test_thinking_of_messages_is_a_variable_of_the_template() -> None:
    for kind, on in (("enabled", True), ("disabled", False)):
        assert read_messages(thinking={"type": kind}).template_variables == {"enable_thinking": on}
    assert read_messages(output_config={"effort": "low"}).reasoning_effort == "low"


PLAIN = base64.b64encode(b"a,b").decode()
DOCUMENTS: list[tuple[Read, dict[str, Any], str]] = [
    (
        read_response,
        {"type": "input_file", "filename": "x.csv", "file_data": f"data:text/csv;base64,{PLAIN}"},
        '<file name="x.csv">\na,b\n</file>',
    ),
    (read_response, {"type": "input_file", "file_data": PLAIN}, "<file>\na,b\n</file>"),
    (
        read_response,
        {"type": "input_file", "file_data": "data:text/plain;charset=utf-8,5%25%20of%20%C3%A9é"},
        "<file>\n5% of éé\n</file>",
    ),
    (
        read_messages,
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
        "<file>\na\n</file>",
    ),
    (
        read_messages,
        {"type": "document", "title": "T", "source": {"type": "base64", "data": PLAIN}},
        '<file name="T">\na,b\n</file>',
    ),
    (
        read_messages,
        {
            "type": "search_result",
            "source": "https://a",
            "content": [{"type": "text", "text": "found"}],
        },
        '<file name="https://a">\nfound\n</file>',
    ),
]


def test_text_documents_are_read() -> None:
    for read, part, text in DOCUMENTS:
        turns = [{"role": "user", "content": [part]}]
        given = read(**({"input": turns} if read is read_response else {"messages": turns}))
        assert given.messages == [{"role": "user", "content": text}]


def test_other_files_are_refused() -> None:
    typed = ["image/png;base64,AAAA", "application/pdf,x", "text/plain,%FF"]
    for data in ["é", *(f"data:{rest}" for rest in typed)]:
        part = {"type": "input_file", "file_data": data}
        turn = {"role": "user", "content": [part]}
        assert refused(read_response, {"input": [turn]}) == "input[0].content[0].file_data"


def test_only_allowed_tools_are_told() -> None:
    def function(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    named = {"mode": "required", "tools": [function("b")]}
    given = read_chat(
        tools=[function("a"), function("b")],
        tool_choice={"type": "allowed_tools", "allowed_tools": named},
    )
    assert (given.tools, given.tool_choice) == ([function("b")], "required")
    flat = [{"type": "function", "name": name} for name in "ab"]
    given = read_chat(tools=flat, tool_choice={"type": "allowed_tools", "tools": flat[1:]})
    assert given.tools == flat[1:]
    given = read_response(tools=flat, tool_choice={"type": "allowed_tools", "tools": flat[:1]})
    assert given.tools is not None
    assert [tool["function"]["name"] for tool in given.tools] == ["a"]
    assert given.tool_choice == "auto"
    with pytest.raises(InvalidRequestError, match="none of tools"):
        read_response(tools=flat[:1], tool_choice={"type": "allowed_tools", "tools": flat[1:]})


ODD: list[Any] = [
    *(None, True, 1, "f", [], {}, ["a"], {"name": ["x"]}, {"function": {"name": "f"}}),
    *({"type": kind, kind: "f"} for kind in ("function", "custom", "allowed_tools", "namespace")),
    *({"type": kind, "name": "f"} for kind in ("function", "custom", "namespace", ["x"])),
    *({"type": kind, kind: {"name": "f"}} for kind in ("function", "custom")),
    {"type": "function", "function": {"name": {}}},
]


@pytest.mark.parametrize("read", [read_chat, read_response])
def test_tools_and_choices_of_any_form_are_read_or_refused(read: Read) -> None:
    chance, results = seeded(), set()
    for _ in range(3000):
        allowed = {"mode": "auto", "tools": chance.choices(ODD, k=2)}
        choices = [
            {"type": "allowed_tools", **allowed},
            {"type": "allowed_tools", "allowed_tools": allowed},
            *chance.choices(ODD, k=2),
        ]
        try:
            given = read(tools=chance.choices(ODD, k=2), tool_choice=chance.choice(choices))
        except InvalidRequestError:
            results.add("refused")
        else:
            results.add(str(given.tool_choice))
    assert {"refused", "auto", "none"} <= results


def test_other_names_of_bodies_without_sampling() -> None:
    texts = decode(b'{"query": "a", "texts": ["b"]}', embeddings.RerankRequest)
    assert texts.documents == ["b"]
    assert decode(b'{"content": "a"}', tokens.TokenizeRequest).prompt == "a"
    constraint = read_chat(grammar='root ::= "a"').constraint
    assert constraint is not None
    assert "start" in constraint.source
    assert read_chat(grammar="").constraint is None
    with pytest.raises(InvalidRequestError, match="cannot be translated"):
        read_chat(grammar="root ::= (")
