"""Fields of llama.cpp, Ollama, vLLM, Hugging Face and OpenRouter: they count, or are named."""

import threading
from typing import Any

import pytest
from bad_input import COMPLETIONS, MESSAGES, RESPONSES, with_fields
from live_server import CHAT, LiveServer, chat
from scripted import TEMPLATE, ScriptedServer, teach


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_texts_of_a_bias_and_of_dry_are_encoded_off_the_event_loop(
    scripted: ScriptedServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary is looked through for each new breaker, which takes long."""
    builder = scripted.model.generator.builder
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
