"""Adapters over HTTP: named beside the model, loaded and unloaded while requests run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters.drawn import dense_tensors, draw, write_peft
from live_server import CHAT, LiveServer, chat, long_chat
from test_exchanges import field_of

from mlxinfer import LLM, hub
from tests.waiting import wait_until

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tensors = dense_tensors(hub.resolve("demo-draft"))
    for seed, name in enumerate(("pirate", "poet")):
        write_peft(root / name, draw(tensors, seed, strength=1.5))
    return root


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(adapter_folders=(str(folder),)) as server:
        yield server


def text(server: LiveServer, model: str) -> str:
    answer = server.post(CHAT, chat(model=model)).json()
    assert answer["model"] == model
    return str(answer["choices"][0]["message"]["content"])


def test_an_adapter_is_a_model_of_its_own_name(server: LiveServer, folder: Path) -> None:
    plain = text(server, "demo")
    for name in ("pirate", "poet"):
        assert server.post(LOAD, {"lora_name": name, "lora_path": name}).status_code == 200
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["demo:pirate"]["parent"] == "demo"
    assert cards["demo"]["parent"] is None
    assert server.get("/v1/models/demo:poet").json()["parent"] == "demo"
    answers = {name: text(server, f"demo:{name}") for name in ("pirate", "poet")}
    assert len({plain, *answers.values()}) == 3
    with LLM("demo-draft") as llm:
        for name, value in answers.items():
            llm.load_adapter(name, folder / name)
            greedy: Any = {"max_tokens": 8, "temperature": 0}
            assert llm.chat("Hello", adapter=name, **greedy).text == value
    with LLM(server.url) as remote:
        assert {adapter["name"] for adapter in remote.adapters} == {"pirate", "poet"}
        assert (
            remote.chat("Hello", adapter="poet", max_tokens=8, temperature=0).text
            == (answers["poet"])
        )
        remote.unload_adapter("poet")
    assert text(server, "demo") == plain
    alone = server.post(CHAT, chat(model="pirate")).json()  # as vLLM's clients name it
    assert alone["model"] == "demo:pirate"
    assert "mlxinfer:adapter_bytes" in server.get("/metrics").text
    assert server.post(UNLOAD, {"lora_name": "pirate"}).status_code == 200


SHORT, OPTIONS = {"max_tokens": 8, "temperature": 0}, {"num_predict": 8, "temperature": 0}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
SAYING: dict[str, tuple[str, dict[str, Any]]] = {  # path -> where the text stands, the body
    CHAT: ("choices.0.message.content", chat()),
    "/v1/completions": ("choices.0.text", {**SHORT, "prompt": "Hello"}),
    "/completion": ("content", {**SHORT, "prompt": "Hello"}),
    "/v1/messages": ("content.0.text", {**HELLO, **SHORT}),
    "/v1/responses": (
        "output.0.content.0.text",
        {"input": "Hello", "temperature": 0, "max_output_tokens": 8},
    ),
    "/api/chat": ("message.content", {**HELLO, "options": OPTIONS, "stream": False}),
    "/api/generate": ("response", {"prompt": "Hello", "options": OPTIONS, "stream": False}),
}


def test_each_api_answers_with_the_adapter_that_is_named(live: LiveServer) -> None:
    assert live.post(LOAD, {"lora_name": "pirate", "lora_path": "pirate"}).status_code == 200
    for path, (place, body) in SAYING.items():
        names = ["demo", "demo:pirate", "pirate"]
        if path.startswith("/api/"):  # with the tag that clients of Ollama add
            names += ["demo:pirate:latest", "pirate:latest"]
        replies = [live.post(path, {**body, "model": name}).json() for name in names]
        plain, *others = (field_of(reply, place) for reply in replies)
        assert len({*others}) == 1, (path, others)
        assert plain not in others, path
    listed = {model["name"] for model in live.get("/api/tags").json()["models"]}
    assert listed == {"demo:latest", "demo:pirate"}
    live.post(UNLOAD, {"lora_name": "pirate"})


def test_a_running_answer_ends_with_the_adapter_that_is_unloaded(server: LiveServer) -> None:
    server.post(LOAD, {"lora_name": "pirate", "lora_path": "pirate"})
    with server.stream(CHAT, long_chat(model="demo:pirate")) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.post(UNLOAD, {"lora_name": "pirate"}).status_code == 200
        gone = server.post(CHAT, chat(model="demo:pirate"))
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        next(lines)
        assert server.stats()["adapter_bytes"] > 0
    wait_until(lambda: server.stats()["adapter_bytes"] == 0)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("../outside", "is not in a folder of --adapter-dir"),
        ("/etc", "is not in a folder of --adapter-dir"),
        ("nothing", "There is no folder"),
        ("a\0b", "is no path"),
        ("x" * 5000, "There is no folder"),
        (".", "is not in a folder of --adapter-dir"),
    ],
)
def test_paths_outside_of_the_folder_are_refused(server: LiveServer, path: str, said: str) -> None:
    answer = server.post(LOAD, {"lora_name": "x", "lora_path": path})
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]


def test_names_that_are_wrong_taken_or_unknown_are_refused(server: LiveServer) -> None:
    assert server.post(LOAD, {"lora_name": "a/b", "lora_path": "pirate"}).status_code == 400
    assert server.post(LOAD, {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
    taken = server.post(LOAD, {"lora_name": "poet", "lora_path": "pirate"})
    assert "already; unload it first" in taken.json()["error"]["message"]
    assert taken.json()["error"]["param"] == "lora_name"
    inplace = {"lora_name": "poet", "lora_path": "pirate", "load_inplace": True}
    assert server.post(LOAD, inplace).status_code == 200
    assert server.post(LOAD, {**inplace, "lora_path": "nothing"}).status_code == 404
    assert text(server, "demo:poet")  # the one that was to be replaced
    assert server.post(UNLOAD, {"lora_name": "poet"}).status_code == 200
    assert server.post(UNLOAD, {"lora_name": "poet"}).status_code == 404
    assert server.post(CHAT, chat(model="demo:poet")).status_code == 404
