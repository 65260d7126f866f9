"""OpenAI's chat: bodies, streams, choices; and OpenAI's own client library."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import CHAT, LiveServer, chat
from openai.types import Completion
from openai.types.chat import ChatCompletion
from sdk_clients import HELLO, openai_client, strictly

from mlxinfer import __version__
from mlxinfer.session import request_builder
from mlxinfer.text.fim import FimTokens

COMPLETIONS = "/v1/completions"
GREETING = "Hello! I am the demo model of mlxinfer."


def content(answer: Any) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_stream_says_role_content_reason_counts_done(server: LiveServer) -> None:
    request = chat("What is 47 + 38", max_tokens=40)
    whole = server.post(CHAT, request).json()
    *chunks, counts, done = server.events(
        CHAT, {**request, "stream_options": {"include_usage": True}}
    )
    assert done == "[DONE]"
    assert counts["choices"] == []
    assert counts["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    text = "".join(c["delta"].get("content", "") for c in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_every_part_of_every_answer_has_the_fingerprint_of_the_server(server: LiveServer) -> None:
    result = [server.post(CHAT, chat()).json() for _ in range(2)]
    result += server.events(CHAT, chat(stream=True))[:-1]
    text = {"prompt": "A", "max_tokens": 2}
    result.append(server.post(COMPLETIONS, text).json())
    result += server.events(COMPLETIONS, {**text, "stream": True})[:-1]
    assert len(result) > 6
    assert {part["system_fingerprint"] for part in result} == {f"mlxinfer-{__version__}"}


def test_seeded_choices_differ_and_repeat_whole_and_streamed(server: LiveServer) -> None:
    request = chat("Tell me about pages", temperature=2.0, seed=5, n=3, max_tokens=5)

    def whole() -> list[str]:
        return [c["message"]["content"] for c in server.post(CHAT, request).json()["choices"]]

    whole()  # from now on the prompt is in the cache, and all are rounded alike
    result = [""] * 3
    for chunk in server.events(CHAT, request)[:-1]:
        choice = chunk["choices"][0]
        result[choice["index"]] += choice["delta"].get("content", "")
    assert result == whole()
    assert len(set(result)) == 3
    assert content(server.post(CHAT, {**request, "n": 1, "seed": 6})) == result[1]


def test_logprobs_spell_the_content(server: LiveServer) -> None:
    request = chat("What is 47 + 38", max_tokens=40, logprobs=True, top_logprobs=3)
    choice = server.post(CHAT, request).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == choice["message"]["content"]
    assert all(len(e["top_logprobs"]) == 3 and e["logprob"] <= 0 for e in entries)
    assert all(e["top_logprobs"][0]["token"] == e["token"] for e in entries)  # greedy
    streamed = [
        entry
        for chunk in server.events(CHAT, request)[:-1]
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert [e["token"] for e in streamed] == [e["token"] for e in entries]


def test_parts_roles_and_nulls_are_read(server: LiveServer) -> None:
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "Hello"},
    ]
    spelled = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": None,
        },
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "Hello"},
    ]
    nulls: dict[str, Any] = {
        "tools": None, "response_format": None, "stop": None, "seed": None, "n": None,
    }  # fmt: skip
    one = server.post(CHAT, chat(messages=plain)).json()
    two = server.post(CHAT, chat(messages=spelled, **nulls, unknown_field={"a": 1})).json()
    assert one["choices"] == two["choices"]
    assert one["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]


def test_timings_are_there_on_request(server: LiveServer) -> None:
    body = chat("Hello", max_tokens=4, timings=True)
    answer = server.post(CHAT, body).json()
    (choice,) = answer["choices"]
    assert answer["timings"] == choice["timings"]  # where llama.cpp has them
    assert choice["timings"]["predicted_n"] == 4
    assert choice["timings"]["prompt_n"] + choice["timings"]["cache_n"] == 12
    assert choice["timings"]["predicted_per_second"] > 0
    events = server.events(CHAT, chat("Hello", max_tokens=4, timings_per_token=True))[:-1]
    timed = [e for e in events if "timings" in e["choices"][0]]
    assert [e["choices"][0]["finish_reason"] for e in timed] == ["length"]
    assert [e["timings"]["predicted_n"] for e in events if "timings" in e] == [4]
    whole = {"prompt": "Hello", "timings": True, "ignore_eos": True}
    (text,) = server.post("/v1/completions", whole).json()["choices"]
    assert text["timings"]["predicted_n"] == 16
    (plain,) = server.post(CHAT, chat("Hello", max_tokens=4)).json()["choices"]
    assert "timings" not in plain


@pytest.mark.alike
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion", "/infill"])
@pytest.mark.ci
def test_a_stream_says_how_far_its_prompt_is(
    server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step with a part of it, and with what was in the cache, as llama.cpp does."""
    marks = FimTokens(prefix=2001, suffix=2002, middle=2003, end_ids=frozenset())
    monkeypatch.setattr(request_builder, "fim_tokens", lambda _: marks)
    text = f"{path} one two three four five six seven eight " * 60
    asked = chat(text, max_tokens=2, return_progress=True)
    asked |= {"prompt": text} if path in ("/v1/completions", "/completion") else {}
    asked |= {"input_prefix": text, "input_suffix": ""} if path == "/infill" else {}
    for cached in (False, True):
        events = [event for event in server.events(path, asked) if event != "[DONE]"]
        result = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert "prompt_progress" not in events[-1]
        assert result
        assert [item["processed"] for item in result] == sorted(
            item["processed"] for item in result
        )
        last = result[-1]
        assert last["processed"] == last["total"] > 500
        assert (last["cache"] > 400) is cached
        assert all(item["cache"] == last["cache"] <= item["processed"] for item in result)
    assert not any("prompt_progress" in e for e in server.events(CHAT, chat("Hi"))[:-1])


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def ask(client: Any, **fields: Any) -> Any:
    given = {"model": "demo", "messages": HELLO, "temperature": 0, "max_tokens": 12, **fields}
    return client.chat.completions.create(**given)


def test_an_answer_is_a_chat_completion_of_the_library(client: openai.OpenAI) -> None:
    answer = ask(client)
    strictly(ChatCompletion, answer)
    assert (answer.choices[0].message.content or "").startswith(GREETING)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_the_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=HELLO, temperature=0, max_tokens=60, logprobs=True, n=2
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    contents = [choice.message.content for choice in final.choices]
    assert len(contents) == 2
    assert contents[0] == contents[1]
    assert (contents[0] or "").startswith(GREETING)


def test_completions_stream_echo_and_give_log_probabilities(client: openai.OpenAI) -> None:
    """Strict but for nulls that OpenAI sends in echoes and chunks and its library does not know."""
    fields: Any = {"model": "demo", "prompt": ["A page", "A token"], "max_tokens": 5}
    answer = client.completions.create(**fields, logprobs=2, temperature=0)
    strictly(Completion, answer)
    with openai.OpenAI(base_url=client.base_url, api_key="none") as loose:
        chunks = list(loose.completions.create(**fields, temperature=0, stream=True))
        echoed = loose.completions.create(**fields, echo=True, logprobs=1)
    for index in (0, 1):
        pieces = [c.choices[0].text for c in chunks if c.choices[0].index == index]
        assert "".join(pieces) == answer.choices[index].text
    assert [c.text.split()[0] for c in echoed.choices] == ["A", "A"]


def test_errors_have_the_librarys_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, top_p=3)
    assert caught.value.param == "top_p"


def test_sixteen_at_once_get_what_each_gets_alone(server: LiveServer) -> None:
    questions = [f"What is {a} + {a + 7}" for a in range(16)]

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, i) for i in range(16)))

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        messages = [{"role": "user", "content": questions[number]}]
        if number % 2:
            answer = await ask(client, messages=messages)
            return answer.choices[0].message.content or ""
        stream = await ask(client, messages=messages, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    together = asyncio.run(all_at_once())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for question, actual in list(zip(questions, together, strict=True))[::3]:  # of both kinds
            alone = ask(client, messages=[{"role": "user", "content": question}])
            assert actual == alone.choices[0].message.content
