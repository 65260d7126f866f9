"""LLM("http://..."): its answers are those of the model in this process."""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "server"))

from lazy_server import LazyServer
from live_server import LONG_TOKENS, LiveServer
from scripted import TEMPLATE, ScriptedServer, taught

from mlxinfer import (
    LLM,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    Program,
    Result,
    SamplingParams,
)
from mlxinfer.cli._open import first_name
from mlxinfer.errors import ServerError
from mlxinfer.remote.answer import RemoteAnswer
from mlxinfer.remote.session import KEEP_ALIVE, connect
from mlxinfer.server.http import DONE, data
from mlxinfer.server.keys import ApiKeys
from mlxinfer.session.inputs import TextInput
from tests.http_site import http_site
from tests.seeds import seeded
from tests.waiting import wait_until

pytestmark = pytest.mark.demo  # `small` must be another model than `demo`

KEY = "sk-test"
QUESTION = [{"role": "user", "content": "Hello, who are you?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(keys=ApiKeys.from_plain([KEY])) as running:
        yield running


@pytest.fixture(scope="module")
def llm(server: LiveServer) -> LLM:
    return LLM(server.url, api_key=KEY)


@pytest.fixture(scope="module")
def here() -> Iterator[LLM]:
    with LLM("demo-draft") as made:
        yield made


def answer_of(result: Result) -> tuple[Any, ...]:
    return (
        result.text,
        result.reasoning,
        result.token_ids,
        result.finish_reason,
        result.prompt_tokens,
        [(call.name, call.arguments, call.complete) for call in result.tool_calls],
    )


@pytest.mark.alike
@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate("The KV cache", max_tokens=9),
        lambda llm: llm.generate([5, 6, 7], SamplingParams(max_tokens=9, temperature=1.5, seed=3)),
        lambda llm: llm.generate(list(np.array([5, 6, 7])), max_tokens=5),
        lambda llm: llm.chat(QUESTION, SamplingParams(max_tokens=60, stop=("a language",))),
        lambda llm: llm.chat("Hello", max_tokens=12, seed=7),
        lambda llm: llm.chat(QUESTION, max_tokens=8, temperature=0),
        lambda llm: llm.chat(
            "Weather?", tools=[WEATHER], tool_choice="required", max_tokens=40, temperature=0
        ),
        lambda llm: llm.generate(
            "It is", response_format={"type": "choice", "choice": ["red", "blue"]}
        ),
        lambda llm: asyncio.run(llm.achat(QUESTION, SamplingParams(max_tokens=5))),
        lambda llm: asyncio.run(llm.agenerate("A page", max_tokens=5)),
    ],
)
def test_answers_are_those_of_the_model_here(llm: LLM, here: LLM, ask: Any) -> None:
    assert answer_of(ask(llm)) == answer_of(ask(here))


@pytest.mark.parametrize("limit", [None, 6])
def test_reasoning_of_a_text_is_split_off_as_by_the_server_itself(limit: int | None) -> None:
    """`mlxinfer run --raw` asks a server that has the model: its budget and parts hold there."""
    with taught(TEMPLATE) as server, LLM(server.url) as there:
        params = SamplingParams(max_tokens=20, ignore_eos=True, max_reasoning_tokens=limit)
        prompt = "<|im_start|>assistant\n<think>\n"
        expected = server.model.session.start(TextInput(prompt=prompt, params=params)).results()[0]
        result = there.generate(prompt, params)
        assert answer_of(result) == answer_of(expected)
        assert result.reasoning
        assert bool(result.text) == (limit is not None)


def test_batches_and_streams_are_those_of_the_model_here(llm: LLM, here: LLM) -> None:
    prompts = ["A page", "A token", [5, 6, 7]]
    params = [SamplingParams(max_tokens=n) for n in (3, 4, 5)]
    both = [[answer_of(r) for r in item.generate(prompts, params)] for item in (llm, here)]
    assert both[0] == both[1]
    deltas = list(llm.stream_chat(QUESTION, max_tokens=20, temperature=0))
    assert "".join(delta.text for delta in deltas) == deltas[-1].result.text
    assert deltas[-1].result.timing.tokens_per_s
    assert len(deltas) > 10


def test_an_answer_is_read_however_its_bytes_are_cut() -> None:
    """JSON has U+2028 and other ends of lines as they are."""
    chance = seeded()
    for _ in range(300):
        texts = [
            "".join(chance.choices("ab é🙂\n\r\x0b\x0c\x1c\x85\u2028\u2029", k=5)) for _ in "abc"
        ]
        frames = [data({"choices": [{"delta": {"content": text}}]}) for text in texts]
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        sent = b"".join([*frames, b": comment\n\n", data(end), DONE])
        cuts = [0, *sorted(chance.choices(range(len(sent)), k=6)), len(sent)]
        answer = RemoteAnswer(0)
        pieces = [sent[a:b] for a, b in itertools.pairwise(cuts)]
        steps = [step for piece in pieces for step in answer.push(piece)]
        assert [step.delta.text for step in steps] == texts
        result = answer.finish().delta.result
        assert result.text == "".join(texts)


def test_texts_come_with_their_ends_of_lines() -> None:
    text = "a\u2028b\x85c\u2029d"
    with ScriptedServer() as server, server.says(text), LLM(server.url) as llm:
        results = [llm.chat("x"), asyncio.run(llm.achat("x")), *llm.generate(["x", "y"])]
        assert [result.text for result in results] == [text] * 4


def test_the_first_error_ends_the_other_answers(llm: LLM, server: LiveServer) -> None:
    long = SamplingParams(max_tokens=LONG_TOKENS, ignore_eos=True)  # 18 s at least
    began_s = time.monotonic()
    with pytest.raises(InvalidRequestError, match="token ids"):
        llm.generate([*["A page"] * 3, [10**6]], long)
    assert time.monotonic() - began_s < 9
    wait_until(server.is_idle)


def test_the_system_asks_whether_a_silent_machine_is_still_there(llm: LLM) -> None:
    options = llm._session.options  # type: ignore[attr-defined]

    async def asked() -> list[int]:
        async with (
            httpx2.AsyncClient(**options(httpx2.AsyncHTTPTransport)) as client,
            client.stream("GET", "/health") as answer,
        ):
            return settings(answer)

    def settings(answer: httpx2.Response) -> list[int]:
        held = answer.extensions["network_stream"].get_extra_info("socket")
        return [held.getsockopt(level, name) for level, name, _ in KEEP_ALIVE]

    with (
        httpx2.Client(**options(httpx2.HTTPTransport)) as client,
        client.stream("GET", "/health") as answer,
    ):
        for on, *seconds in (settings(answer), asyncio.run(asked())):
            assert on
            assert seconds == [value for *_, value in KEEP_ALIVE[1:]]


@pytest.mark.alike
@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}, "no JSON", ""])
@pytest.mark.parametrize("framed", [True, False])
def test_messages_have_the_tokens_that_they_have_here(
    llm: LLM, here: LLM, arguments: Any, framed: bool
) -> None:
    function = {"name": "weather", "arguments": arguments}
    call: Any = {"id": "call_1", "function": function} if framed else {"id": "call_1", **function}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": (call,)},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
    ]
    for choice in ("auto", "none"):
        for one in (QUESTION, messages):
            ids = [
                m.apply_chat_template(one, tools=[WEATHER], tool_choice=choice) for m in (llm, here)
            ]
            assert ids[0] == ids[1]
    both = [answer_of(m.chat(messages, max_tokens=4, temperature=0)) for m in (llm, here)]
    assert both[0] == both[1]
    for m in (llm, here):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            m.chat("a \ud83d")


@pytest.mark.parametrize("said", [b"<html>", b"\xff", b"5", b"[]", b"{}", b'{"data": 5}'])
def test_what_is_no_server_of_models_is_named(said: bytes) -> None:
    with http_site(lambda _: (200, {}, [said])) as url:
        for ask_it in (LLM, first_name):
            with pytest.raises(ServerError, match=r"no (mlxinfer )?server"):
                ask_it(url)


def test_leaving_a_stream_ends_the_request_at_the_server(llm: LLM, server: LiveServer) -> None:
    for number, _ in enumerate(llm.stream("A", max_tokens=1000, ignore_eos=True)):
        if number == 3:
            break
    wait_until(server.is_idle)


def test_errors_of_the_server_are_the_errors_of_the_model(llm: LLM, server: LiveServer) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate("word " * 4000)
    with pytest.raises(InvalidRequestError, match="tool_choice") as caught:
        llm.chat("Hello", tool_choice="required")
    assert caught.value.param == "tools"
    with pytest.raises(ServerError, match="Set MLXINFER_API_KEY"):
        LLM(server.url, api_key="sk-wrong")
    with pytest.raises(ServerError, match=r"no model 'nothing'; it has demo"):
        LLM(server.url, api_key=KEY, served_model="nothing")
    with pytest.raises(ServerError, match="No server answers"):
        LLM("http://127.0.0.1:9")


def test_what_does_not_go_over_http_is_refused_by_name(llm: LLM, server: LiveServer) -> None:
    for name in ("tokenizer", "end_ids", "path"):
        with pytest.raises(InvalidRequestError, match=f"{name} is not there"):
            getattr(llm, name)
    for ask in (llm.pin, llm.logits):
        with pytest.raises(InvalidRequestError, match="is not there for the model at"):
            ask("A page")
    with pytest.raises(InvalidRequestError, match="logprobs does not go over HTTP"):
        llm.chat("Hello", logprobs=2)
    for method in (llm.chat, llm.generate):
        with pytest.raises(InvalidRequestError, match="logits_processors does not go over HTTP"):
            method("Hello", logits_processors=[max])
        with pytest.raises(InvalidRequestError, match="sampler does not go over HTTP"):
            method("Hello", sampler=max)
    assert llm.generate("Hello", max_tokens=2, speculate=False).timing.drafted == 0
    with pytest.raises(InvalidRequestError, match=r"kv_bits: the server at .* chose its"):
        LLM(server.url, api_key=KEY, kv_bits=8)
    with pytest.raises(InvalidRequestError, match="api_key and served_model go with the address"):
        LLM("demo-draft", api_key=KEY)


def test_it_answers_with_the_models_own_values(llm: LLM, here: LLM) -> None:
    assert llm.chat_params == here.chat_params
    facts = [(m.sees, m.chats, m.thinking, m.vocab_size) for m in (llm.model_info, here.model_info)]
    assert facts[0] == facts[1]


def test_the_prompt_is_reported_as_it_is_here(llm: LLM, here: LLM) -> None:
    reports: list[list[tuple[int, int]]] = []
    for model, text in ((llm, "word " * 700), (here, "word " * 700)):
        seen: list[tuple[int, int]] = []
        reports.append(seen)
        read: Any = lambda *report, seen=seen: seen.append(report)  # noqa: E731
        for _ in model.stream(text, max_tokens=1, prompt_progress_callback=read):
            assert seen
        assert [report[1] for report in seen] == [seen[-1][0]] * len(seen)
    assert reports[0][-1] == reports[1][-1]


def test_it_waits_until_the_server_has_loaded_the_model() -> None:
    with LazyServer() as server:
        server.go_on.clear()
        (_, slot) = server.service.models.slots()
        seen: list[tuple[int, int]] = []

        def watch(done: int, total: int) -> None:
            seen.append((done, total))
            slot.entry.progress(total // 2, total)
            if done:
                server.go_on.set()

        session = connect(server.url, None, "small", {}, watch)
        assert [done for done, _ in seen][:2] == [0, seen[0][1] // 2]
        assert session.info.vocab_size
        assert server.states() == {"big": "unloaded", "small": "loaded"}


def test_it_says_what_it_is(server: LiveServer) -> None:
    with LLM(f"{server.url}/v1", api_key=KEY) as llm:
        assert repr(llm) == f"LLM('demo', at {server.url})"
        assert "demo" in llm._repr_html_()
        assert llm.stats()["state"] == "loaded"
    with pytest.raises(EngineClosedError):
        llm.generate("A")


def test_the_server_gives_the_ids_of_tokens_where_they_are_asked_for(server: LiveServer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for path, prompt in (
        ("/v1/completions", {"prompt": "A page"}),
        ("/v1/chat/completions", {"messages": QUESTION}),
    ):
        body = {**prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        whole = server.post(path, body, headers=headers).json()["choices"][0]
        sent = server.post(path, {**body, "stream": True}, headers=headers)
        events = [json.loads(x[6:]) for x in sent.text.splitlines() if x.startswith("data: {")]
        ids = [i for event in events for c in event["choices"] for i in c.get("token_ids", ())]
        assert ids == whole["token_ids"]
        assert len(ids) == 6
        del body["return_token_ids"]
        assert "token_ids" not in server.post(path, body, headers=headers).json()["choices"][0]


def test_a_program_runs_as_it_does_here_but_has_no_scores(llm: LLM, here: LLM) -> None:
    def run(p: Program) -> list[Any]:
        p.user("What is a KV cache?")
        p += "It is "
        p.gen("first")
        branches = p.fork(2)
        branches.user("And a page?")
        branches.gen("second", temperature=1, seed=3)
        p.join()
        return [p["first"], p["second"], p.messages]

    options: Any = {"max_tokens": 6, "temperature": 0}
    assert run(llm.program(**options)) == run(here.program(**options))
    assert llm.map(ask, [1, 2], **options) == here.map(ask, [1, 2], **options)


@pytest.mark.parametrize("chats", [True, False])
def test_a_program_selects_by_the_scores_of_the_server(llm: LLM, here: LLM, chats: bool) -> None:
    choices = ["the keys", "purple cows and more", "a"]

    def run(p: Program) -> list[Any]:
        if chats:
            p.user("What does it keep?")
        else:
            p += "The KV cache keeps "
        branches = p.fork(2)
        result = [*branches.select("it", choices), branches[0].select("more", choices[1:])]
        return [*result, asyncio.run(p.aselect("sums", choices, per_token=False))]

    for remote, local in zip(run(llm.program()), run(here.program()), strict=True):
        assert remote.text == local.text
        assert remote.scores == {t: pytest.approx(s, abs=0.01) for t, s in local.scores.items()}
    with llm.program() as p:
        p.user("What is it?", images=["drawing.png"])
        with pytest.raises(InvalidRequestError, match="ids of pictures are the server's"):
            p.select("it", choices)


def test_log_probabilities_of_the_answer_come_from_the_server(llm: LLM, here: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=0)
    for there, own in (
        (llm.chat(QUESTION, params), here.chat(QUESTION, params)),
        (llm.generate("A cat", params), here.generate("A cat", params)),
    ):
        assert there.logprobs is not None
        assert own.logprobs is not None
        expected = [logprob.logprob for logprob in own.logprobs]
        assert [logprob.logprob for logprob in there.logprobs] == pytest.approx(expected, abs=0.01)


def ask(p: Program, number: int) -> str:
    p += f"Number {number}"
    return p.gen("more").text
