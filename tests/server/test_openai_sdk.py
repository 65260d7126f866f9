"""OpenAI's own client library against the server, with its types checked strictly."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, wait_until
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from sdk_clients import HELLO, openai_client, strictly

GREETING = "Hello! I am the demo model of mlxinfer."
LONG = {"max_tokens": 1800, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def ask(client: Any, **fields: Any) -> Any:
    given = {"model": "demo", "messages": HELLO, "temperature": 0, "max_tokens": 12, **fields}
    return client.chat.completions.create(**given)


def test_an_answer(client: openai.OpenAI) -> None:
    answer = ask(client)
    strictly(ChatCompletion, answer)
    assert (answer.choices[0].message.content or "").startswith(GREETING)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text.startswith(GREETING)
    assert chunks[-1].usage.total_tokens > 12


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


def test_logprobs_n_and_seed(client: openai.OpenAI) -> None:
    fields = {"n": 2, "seed": 7, "temperature": 2.0, "logprobs": True, "top_logprobs": 5}
    one, two = ask(client, **fields), ask(client, **fields)
    strictly(ChatCompletion, one)
    assert [c.message for c in one.choices] == [c.message for c in two.choices]
    assert one.choices[0].message != one.choices[1].message
    assert len(one.choices[0].logprobs.content[0].top_logprobs) == 5
    for chunk in ask(client, stream=True, **fields):
        strictly(ChatCompletionChunk, chunk)


def test_completions(client: openai.OpenAI) -> None:
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


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    strictly(Model, model)
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_what_is_not_there_is_a_clean_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="demo", prompt="x")
    assert caught.value.code == "not_found"


def test_errors_have_the_librarys_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, top_p=3)
    assert caught.value.param == "top_p"


def test_a_cancelled_stream_ends_the_request(client: openai.OpenAI, server: LiveServer) -> None:
    stream = ask(client, stream=True, **LONG)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    wait_until(server.is_idle)


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
        for question, found in list(zip(questions, together, strict=True))[::3]:  # of both kinds
            alone = ask(client, messages=[{"role": "user", "content": question}])
            assert found == alone.choices[0].message.content


def test_a_cancelled_task_ends_its_request(server: LiveServer) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            task = asyncio.create_task(ask(client, **LONG))
            while server.stats()["running"] == 0:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(leave())
    wait_until(server.is_idle)


def test_a_keyed_server_takes_the_librarys_key() -> None:
    from mlxinfer.server.keys import ApiKeys

    with LiveServer(keys=ApiKeys.from_plain(["sk-1"])) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-1") as client:
            assert client.models.list().data
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-2")
        with client, pytest.raises(openai.AuthenticationError):
            client.models.list()
