"""Fields and spellings of other servers' clients, and answers that go on with a message."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from bad_input import COMPLETIONS, MESSAGES, RESPONSES, with_fields
from live_server import CHAT, LiveServer, chat
from scripted import TEMPLATE, ScriptedServer, taught
from text.text_data import load_tokenizer

from mlxinfer.session.request_builder import RequestBuilder
from mlxinfer.session.session import Session
from mlxinfer.text import ChatTemplate
from tests.watching import note_calls


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_texts_of_a_bias_and_of_dry_are_encoded_off_the_event_loop(
    scripted: ScriptedServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary is looked through for each new breaker, which takes long."""
    tokenizer = scripted.model.session.builder.tokenizer

    def place(text: str, **_: Any) -> tuple[str, int]:
        return text, threading.get_ident()

    searched = note_calls(monkeypatch, tokenizer, "ids_with", place)
    encoded = note_calls(monkeypatch, tokenizer, "encode", place)
    fields = {"dry_multiplier": 0.8, "dry_sequence_breakers": [f"breaker of {path}"]}
    with scripted.says("x"):
        body = with_fields(path, logit_bias=[["a bias", 1]], **fields)
        assert scripted.post(path, body).status_code == 200
    threads = [thread for _, thread in searched]
    threads += [thread for text, thread in encoded if text == "a bias"]
    assert len(threads) == 2
    assert scripted.loop_thread not in threads


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_closed_at_its_budget(stream: bool) -> None:
    with taught(TEMPLATE + "<think>\n") as server:
        body = chat(max_tokens=20, ignore_eos=True, stream=stream, reasoning_budget=6)
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
        assert said["content"]


def test_a_completion_splits_reasoning_off_if_asked() -> None:
    with taught(TEMPLATE) as server:
        body = {"model": "demo", "prompt": "<think>\n", "max_tokens": 20, "ignore_eos": True}
        split = {**body, "reasoning_format": "deepseek", "thinking_budget_tokens": 6}
        choice = server.post(COMPLETIONS, split).json()["choices"][0]
        assert choice["reasoning_content"]
        assert choice["text"]
        plain = server.post(COMPLETIONS, body).json()["choices"][0]
        assert plain["text"]
        assert "reasoning_content" not in plain
        del split["reasoning_format"]
        refused = server.post(COMPLETIONS, split)
        assert refused.json()["error"]["param"] == "thinking_budget_tokens"


def test_prompts_with_different_salts_share_no_cache(server: LiveServer) -> None:
    def cached(salt: str | None) -> int:
        body = chat("salted pages of keys and values " * 20, cache_salt=salt)
        usage = server.post(CHAT, body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cold = cached("a")
    assert cached("a") > cold + 50
    assert cached("b") <= cold + 16
    assert cached(None) <= cold + 16  # the template is the same for all
    assert cached("b") > cold + 50


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_max_tokens_beyond_the_context_is_the_context(scripted: ScriptedServer, path: str) -> None:
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for max_tokens in (2048, 2**40, 10**15):
        with scripted.says("x"):
            answer = scripted.post(path, {**with_fields(path), name: max_tokens})
            assert answer.status_code == 200, answer.text
            (request,) = scripted.script.requests
        assert request.params.max_tokens == 2048 - len(request.prompt_ids)


HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.mark.alike
@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_base_url_may_end_as_it_likes(server: LiveServer, path: str) -> None:
    given: Any = {"base_url": server.url + path, "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**given) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
        answer = client.chat.completions.create(model="demo", messages=HI, max_tokens=2)
        assert answer.choices[0].message.content
        assert client.responses.create(model="demo", input="Hi", max_output_tokens=2).output_text
    with anthropic.Anthropic(**given) as client_:
        assert client_.messages.create(model="demo", messages=HI, max_tokens=2).content


@pytest.mark.parametrize("path", [f"{CHAT}/", "/chat/completions", "/v1/v1/chat/completions"])
def test_a_path_may_be_written_otherwise(server: LiveServer, path: str) -> None:
    assert server.post(path, chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_counts_in_every_event(server: LiveServer, path: str) -> None:
    fields = {"include_usage": True, "continuous_usage_stats": True}
    body: Any = {"max_tokens": 6, "ignore_eos": True, "stream_options": fields}
    body |= {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    *events, done = server.events(path, body)
    assert done == "[DONE]"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(set(counts)) > 2
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = {"role": "user", "content": "What does the cat do?"}
BEGUN = {"role": "assistant", "content": "The cat"}


@pytest.fixture
def spaced() -> Iterator[ScriptedServer]:
    """A server with a decoder that takes the first space off a text."""
    with ScriptedServer() as server:
        tokenizer = load_tokenizer("sentencepiece")
        tokenizer.template = ChatTemplate(PLAIN, variables={})
        model = server.model
        model.session.builder.close()
        info = replace(model.session.info, vocab_size=tokenizer.vocab_size)
        assert isinstance(model.session, Session)
        model.session.builder = RequestBuilder(tokenizer, info, "auto")
        server.script._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        yield server


def said(server: ScriptedServer, messages: list[Any], **fields: Any) -> str:
    answer = server.post("/v1/chat/completions", {"messages": messages, **fields}).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_begun_answer_goes_on_without_a_space_of_its_own(spaced: ScriptedServer) -> None:
    with spaced.says("sleeps"):
        assert said(spaced, [ASKED]) == "sleeps"
        assert said(spaced, [ASKED, BEGUN], continue_final_message=True) == " sleeps"
