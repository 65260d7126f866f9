"""Ollama's API, as its own client library sees it."""

# every field of an answer of the SDK is optional:
# mypy: no-strict-optional

import threading
from collections.abc import Callable
from typing import Any

import ollama
import pytest
from lazy_server import MB, LazyServer
from scripted import ScriptedServer
from sdk_clients import CALLS, CHAT_TOOLS, HELLO, NOW, WEATHER, client_fixture, ollama_client

from mlxinfer.errors import ModelNotFoundError
from tests.waiting import wait_until

pytestmark = pytest.mark.demo  # `small` must be another model than `demo`

GREEDY: Any = {"temperature": 0, "num_predict": 4}


client = client_fixture("scripted", ollama_client)
demo = client_fixture("live", ollama_client)


@pytest.mark.parametrize("name", ["demo", "demo:latest"])
def test_a_chat_whole_and_streamed(demo: ollama.Client, name: str) -> None:
    whole = demo.chat(name, HELLO, options=GREEDY)
    assert whole.message.content == "Hello! I am"
    assert (whole.model, whole.done, whole.done_reason) == (name, True, "length")
    assert (whole.eval_count, whole.prompt_eval_count) == (4, 12)
    assert whole.total_duration >= whole.eval_duration > 0
    parts = list(demo.chat(name, HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 4


def test_a_text_is_answered_or_continued(demo: ollama.Client) -> None:
    answered = demo.generate("demo", "Hello", options=GREEDY)
    assert answered.response == "Hello! I am"
    raw = demo.generate("demo", "Hello", raw=True, options=GREEDY)
    assert raw.prompt_eval_count < answered.prompt_eval_count
    parts = list(demo.generate("demo", "Hello", stream=True, options=GREEDY))
    assert "".join(part.response for part in parts) == answered.response


def test_calls_and_thoughts_are_read_and_written_as_ollama_does(
    client: ollama.Client, scripted: ScriptedServer
) -> None:
    earlier: Any = [
        *HELLO,
        {
            "role": "assistant",
            "thinking": "so",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}],
        },
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
    ]
    with scripted.says(f"<think>hm</think>I look.{WEATHER}{NOW}"):
        whole = client.chat("demo", earlier, tools=CHAT_TOOLS[:1])
        for text in ("<think>so</think>", "Ulm", "rain"):
            assert text in scripted.prompt
        parts = list(client.chat("demo", earlier, tools=CHAT_TOOLS[:1], stream=True))
    calls = whole.message.tool_calls
    assert [(c.function.name, c.function.arguments) for c in calls] == CALLS
    assert (whole.message.thinking, whole.message.content) == ("hm", "I look.")
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(c.function.name, c.function.arguments) for c in streamed] == CALLS
    assert "".join(part.message.thinking or "" for part in parts) == "hm"


def test_log_probabilities_spell_the_answer(demo: ollama.Client) -> None:
    said = demo.chat("demo", HELLO, logprobs=True, top_logprobs=2, options=GREEDY)
    assert said.logprobs is not None
    assert "".join(logprob.token for logprob in said.logprobs) == said.message.content
    assert len(said.logprobs[0].top_logprobs or ()) == 2
    pieces = demo.generate("demo", "Hello", logprobs=True, options=GREEDY, stream=True)
    assert all(piece.logprobs for piece in pieces if piece.response)


REFUSED: list[Callable[[Any], Any]] = [
    lambda c: c.chat("demo", [{"role": "user", "content": "x", "images": [b"x"]}]),
    lambda c: c.generate("demo", "x", images=[b"x"]),
    lambda c: c.generate("demo", "x", context=[1]),
    lambda c: c.generate("demo", "x", template="{{ .Prompt }}"),
    lambda c: c.generate("demo", "x", suffix="y"),
    lambda c: c.chat("demo", HELLO, options={"mirostat": 2}),
    lambda c: c.chat("demo", HELLO, options={"temperature": -1}),
    lambda c: c.chat("demo", HELLO, format={"type": "strng"}),
    lambda c: c.embed("demo", "x"),  # it generates text
]
LOST: list[Callable[[Any], Any]] = [
    lambda c: c.chat("other", HELLO),
    lambda c: c.show("other"),
    lambda c: c.embed("other", "x"),
    lambda c: list(c.chat("other", HELLO, stream=True)),
]


def test_what_cannot_be_is_refused(demo: ollama.Client) -> None:
    for status, asks in ((400, REFUSED), (404, LOST)):
        for number, ask in enumerate(asks):
            with pytest.raises(ollama.ResponseError) as caught:
                ask(demo)
            assert caught.value.status_code == status, number
            assert caught.value.error


def test_what_is_not_served_is_said_in_ollamas_words(demo: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"^Nothing is served at this path"):
        demo.copy("demo", "x")


def test_models_are_listed_shown_loaded_and_unloaded() -> None:
    kv = {"kv_bytes": 8 * MB}
    with LazyServer(fields={"big": kv, "small": kv}) as server, ollama_client(server) as client:
        assert [model.model for model in client.list().models] == ["big:latest", "small:latest"]
        assert client.ps().models == []
        assert client.chat("small", []).done_reason == "load"
        (running,) = client.ps().models
        assert (running.name, running.context_length) == ("small:latest", 2048)
        assert running.size_vram == running.size > 0  # memory is unified
        shown = client.show("small:latest")
        assert set(shown.capabilities) == {"completion", "tools"}
        architecture = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{architecture}.context_length"] == 2048
        assert client.generate("small", "", keep_alive=0).done_reason == "unload"
        assert client.ps().models == []
        assert server.get("/api/version").json()["version"].count(".") == 2


def test_a_pull_is_refused_unless_it_is_allowed(demo: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="allow-pull") as caught:
        demo.pull("org/tiny")
    assert caught.value.status_code == 403


def test_an_allowed_pull_reports_progress_and_serves_the_model() -> None:
    kv = {"kv_bytes": 8 * MB}
    with LazyServer(fields={"big": kv, "small": kv}) as server, ollama_client(server) as client:
        go_on = threading.Event()

        def fetch(name: str, report: Callable[[tuple[int, int]], None]) -> Any:
            if name != "org/tiny":
                raise ModelNotFoundError(f"{name} is not on the hub")
            report((10, 100))
            assert go_on.wait(60)
            return server.entry(name, "demo-draft", {"kv_bytes": 8 * MB})

        server.service.fetch = fetch
        lines = []
        for progress in client.pull("org/tiny", stream=True):
            lines.append(progress)
            if progress.completed == 10:
                go_on.set()
        assert lines[0].status == "pulling manifest"
        assert lines[-1].status == "success"
        assert (10, 100) in {(line.completed, line.total) for line in lines}
        assert client.chat("org/tiny", HELLO, options=GREEDY).done
        assert client.pull("org/tiny").status == "success", "it is here already"
        with pytest.raises(ollama.ResponseError, match="not on the hub"):
            list(client.pull("org/other", stream=True))
        wait_until(lambda: not server.service.calls)
