"""Fields of llama.cpp, Ollama, vLLM, Hugging Face and OpenRouter: they count, or are named."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import COMPLETIONS, MESSAGES, RESPONSES, with_fields
from live_server import CHAT, LiveServer, chat
from scripted import TEMPLATE, ScriptedServer, teach

THINKING = TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
EFFORT = TEMPLATE + "{{ reasoning_effort }}"


SAMPLERS: list[tuple[str, Any, str, Any]] = [
    ("repeat_penalty", 1.3, "repetition_penalty", 1.3),
    ("min_new_tokens", 2, "min_tokens", 2),
    ("random_seed", 5, "seed", 5),
    ("typ_p", 0.9, "typical_p", 0.9),
    ("typical", 0.9, "typical_p", 0.9),
    ("top_n_sigma", -1, "top_n_sigma", 0.0),
    ("top_n_sigma", 1.5, "top_n_sigma", 1.5),
    ("xtc_probability", 0.5, "xtc_probability", 0.5),
    ("xtc_threshold", 0.2, "xtc_threshold", 0.2),
    ("dry_multiplier", 0.8, "dry_multiplier", 0.8),
    ("dry_sequence_breakers", ["\n", "x"], "dry_sequence_breakers", ("\n", "x")),
    ("logit_bias", [[5, 2], ["x", -1.5], [7, False]], "logit_bias", {5: 2, 90: -1.5, 7: -1e9}),
    ("logit_bias", {"5": 2}, "logit_bias", {5: 2}),
    ("presence_penalty", 0.5, "presence_penalty", 0.5),
    ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
    ("min_p", 0.05, "min_p", 0.05),
    ("seed", 7, "seed", 7),
    ("ignore_eos", True, "ignore_eos", True),
    ("stop_token_ids", [9], "stop_token_ids", (9,)),
    ("speculate", False, "speculate", False),
]
LIMITS: list[tuple[str, Any, str, Any]] = [
    ("num_predict", 7, "max_tokens", 7),
    ("n_predict", 7, "max_tokens", 7),
    ("max_new_tokens", 7, "max_tokens", 7),
    ("n_predict", -1, "max_tokens", None),
    ("max_tokens", -1, "max_tokens", None),
    ("stop_sequences", ["x", "y"], "stop", ("x", "y")),
    ("stop", ["x"] * 64, "stop", ("x",) * 64),
]
CASES = [(path, *case) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES) for case in SAMPLERS]
CASES += [(path, *case) for path in (CHAT, COMPLETIONS) for case in LIMITS]


@pytest.mark.parametrize(("path", "field", "value", "name", "expected"), CASES)
def test_a_sampling_field_counts_under_any_of_its_names(
    scripted: ScriptedServer, path: str, field: str, value: Any, name: str, expected: Any
) -> None:
    body = with_fields(path, **{field: value})
    if name == "max_tokens" and field != name:
        body.pop("max_tokens", None)
    with scripted.says("x"):
        answer = scripted.post(path, body)
        assert answer.status_code == 200, answer.text
        (request,) = scripted.script.requests
    assert getattr(request.params, name) == expected


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_texts_of_a_bias_and_of_dry_are_encoded_off_the_event_loop(
    scripted: ScriptedServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary is looked through for each new breaker, which takes long."""
    builder = scripted.model.session.builder
    real, threads = builder.tokenizer.ids_with, []

    def ids_with(text: str) -> frozenset[int]:
        threads.append(threading.get_ident())
        return real(text)

    def biased(token: str, **kwargs: Any) -> list[int]:
        if token == "a bias":
            threads.append(threading.get_ident())
        return encode(token, **kwargs)

    encode = builder.tokenizer.encode
    monkeypatch.setattr(builder.tokenizer, "ids_with", ids_with)
    monkeypatch.setattr(builder.tokenizer, "encode", biased)
    fields = {"dry_multiplier": 0.8, "dry_sequence_breakers": [f"breaker of {path}"]}
    with scripted.says("x"):
        body = with_fields(path, logit_bias=[["a bias", 1]], **fields)
        assert scripted.post(path, body).status_code == 200
    assert len(threads) == 2
    assert scripted.loop_thread not in threads


def test_two_names_of_one_field_must_agree(scripted: ScriptedServer) -> None:
    answer = scripted.post(CHAT, chat(repeat_penalty=1.3, repetition_penalty=1.1))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "repeat_penalty"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("no_repeat_ngram_size", 3, 0),
        ("samplers", ["top_k"], []),
        ("tfs_z", 0.9, 1.0),
        ("mirostat", 2, 0),
        ("mirostat_mode", 2, 0),
        ("top_a", 0.2, 0.0),
        ("num_beams", 4, 1),
        ("guidance_scale", 1.5, 1),
        ("do_sample", False, True),
        ("safe_prompt", True, False),
        ("lora", [{"id": 0, "scale": 0.5}], []),
    ],
)
def test_a_field_without_a_meaning_here_is_named(
    scripted: ScriptedServer, path: str, field: str, value: Any, neutral: Any
) -> None:
    answer = scripted.post(path, with_fields(path, **{field: value}))
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
    with scripted.says("x"):
        answer = scripted.post(path, with_fields(path, **{field: neutral}))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_predict": 5},
        {"n_predict": 5},
        {"max_new_tokens": 5},
        {"format": "json"},
        {"enable_thinking": False},
        {"reasoning_budget": 0},
        {"thinking_budget_tokens": 10},
        {"guided_regex": "a"},
        {"ebnf": 'root ::= "a"'},
        {"stop": ["x"]},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_fields_of_chat_are_named_in_other_apis(
    scripted: ScriptedServer, path: str, fields: dict[str, Any]
) -> None:
    answer = scripted.post(path, with_fields(path, **fields))
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["error"]["message"]


def test_responses_name_stop_sequences(scripted: ScriptedServer) -> None:
    answer = scripted.post(RESPONSES, with_fields(RESPONSES, stop_sequences=["x"]))
    assert answer.json()["error"]["param"] == "stop_sequences"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "fields", [{"n": 1}, {"stop": []}, {"logprobs": False}, {"response_format": {"type": "text"}}]
)
def test_fields_of_chat_that_ask_for_nothing_are_skipped(
    scripted: ScriptedServer, path: str, fields: dict[str, Any]
) -> None:
    with scripted.says("x"):
        assert scripted.post(path, with_fields(path, **fields)).status_code == 200


def test_a_window_of_the_repetition_penalty_is_kept(server: LiveServer) -> None:
    """Of all names of it; a window of no token is no penalty."""
    fields = {"max_tokens": 10, "temperature": 0, "repeat_penalty": 50}
    plain = said(server, max_tokens=10, temperature=0)
    everywhere, recent = said(server, **fields), said(server, **fields, repetition_window=4)
    assert len({plain, everywhere, recent}) == 3
    for window in ("repeat_last_n", "penalty_last_n", "repetition_context_size"):
        for tokens, expected in ((0, plain), (-1, everywhere), (4, recent)):
            assert said(server, **fields, **{window: tokens}) == expected, (window, tokens)
        answer = server.post(CHAT, chat("Hello", **{window: 4, "repetition_window": 5}))
        assert answer.json()["error"]["param"] == window


def said(server: LiveServer, **fields: Any) -> str:
    """The text that a model gives."""
    answer = server.post(CHAT, chat("Tell me about a page", **fields)).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture
def thinking() -> Iterator[ScriptedServer]:
    with ScriptedServer(THINKING) as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "off"),
    [
        ({}, False),
        ({"enable_thinking": False}, True),
        ({"enable_thinking": True}, False),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "enabled"}}, False),
        ({"thinking": False}, True),
        ({"think": False}, True),
        ({"reasoning": {"enabled": False}}, True),
        ({"reasoning_budget": 0}, True),
        ({"reasoning_budget": -1}, False),
    ],
)
def test_reasoning_is_switched_by_any_name(
    thinking: ScriptedServer, fields: dict[str, Any], off: bool
) -> None:
    with thinking.says("x"):
        answer = thinking.post(CHAT, chat(**fields))
        assert answer.status_code == 200, answer.text
        assert thinking.prompt.endswith("<think></think>") is off


BUDGETS: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled", "budget_tokens": 6}},
    {"reasoning": {"max_tokens": 6}},
    {"reasoning_budget": 6},
    {"thinking_budget_tokens": 6},
    {"thinking_token_budget": 6, "reasoning_budget": 6},
]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_closed_at_its_budget(stream: bool) -> None:
    with LiveServer() as server:
        teach(server.model, TEMPLATE + "<think>\n")
        for fields in BUDGETS:
            body = chat(max_tokens=20, ignore_eos=True, stream=stream, **fields)
            if stream:
                deltas = [e["choices"][0]["delta"] for e in server.events(CHAT, body)[:-1]]
                said = {
                    key: "".join(delta.get(key) or "" for delta in deltas)
                    for key in ("content", "reasoning_content")
                }
            else:
                said = server.post(CHAT, body).json()["choices"][0]["message"]
            ids = server.model.tokenizer.encode(said["reasoning_content"], add_special_tokens=False)
            assert 1 <= len(ids) <= 6
            assert said["content"], fields


def test_the_budget_of_messages_reaches_the_request(scripted: ScriptedServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with scripted.says("x"):
        body = with_fields(MESSAGES, thinking=thinking, max_tokens=1500)
        assert scripted.post(MESSAGES, body).status_code == 200
        assert scripted.script.requests[-1].params.max_reasoning_tokens == 1024
        assert scripted.script.requests[-1].grammar is not None


@pytest.mark.parametrize("fields", [{"think": "high"}, {"reasoning": {"effort": "high"}}])
def test_the_effort_has_other_names(fields: dict[str, Any]) -> None:
    with ScriptedServer(EFFORT) as server, server.says("x"):
        assert server.post(CHAT, chat(**fields)).status_code == 200
        assert server.prompt.endswith("high")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "thinking": False}, "thinking"),
        ({"think": True, "chat_template_kwargs": {"enable_thinking": False}}, "think"),
        ({"reasoning_budget": 100, "reasoning": {"max_tokens": 99}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"reasoning_effort": "low", "think": "high"}, "think"),
        ({"think": "high", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_contradictions_of_reasoning_are_named(
    scripted: ScriptedServer, fields: dict[str, Any], param: str
) -> None:
    answer = scripted.post(CHAT, chat(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("form", ["json", {"type": "object", "required": ["a"]}])
def test_ollamas_format_is_a_constraint(server: LiveServer, form: Any) -> None:
    answer = server.post(CHAT, chat(format=form, max_tokens=20))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_prompts_with_different_salts_share_no_cache(server: LiveServer, path: str) -> None:
    def cached(salt: str | None) -> int:
        words = "pages of keys and values " * 20
        body = with_fields(path, cache_salt=salt)
        text = f"{path} {words}"
        body |= {"input": text} if path == RESPONSES else {}
        body |= {"prompt": text} if path == COMPLETIONS else {}
        body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {}
        usage = server.post(path, body).json()["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])

    cold = cached("a")
    assert cached("a") > cold + 50
    assert cached("b") <= cold + 16
    assert cached(None) <= cold + 16  # the template is the same for all
    assert cached("b") > cold + 50


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5])
def test_a_salt_is_a_short_text(scripted: ScriptedServer, salt: Any) -> None:
    answer = scripted.post(CHAT, chat(cache_salt=salt))
    assert answer.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (CHAT, r"maximum context length is 2048 tokens"),
        (COMPLETIONS, r"maximum context length is 2048 tokens"),
        (RESPONSES, r"maximum context length is 2048 tokens"),
        (MESSAGES, r"prompt is too long: \d+ tokens > 2047 maximum"),
    ],
)
@pytest.mark.parametrize("num_words", [3000, 100_000])
def test_a_prompt_that_is_too_long_is_refused_in_the_apis_words(
    server: LiveServer, path: str, words: str, num_words: int
) -> None:
    text = "word " * num_words
    body = with_fields(path)
    texts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": text}]},
        MESSAGES: {"messages": [{"role": "user", "content": text}]},
        COMPLETIONS: {"prompt": text},
        RESPONSES: {"input": text},
    }
    answer = server.post(path, body | texts[path])
    assert answer.status_code == 400
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(answer.json()["error"]["message"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize("max_tokens", [2048, 2**40, 10**15])
def test_max_tokens_beyond_the_context_is_the_context(
    scripted: ScriptedServer, path: str, max_tokens: int
) -> None:
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    with scripted.says("x"):
        answer = scripted.post(path, {**with_fields(path), name: max_tokens})
        assert answer.status_code == 200, answer.text
        (request,) = scripted.script.requests
    assert request.params.max_tokens == 2048 - len(request.prompt_ids)
