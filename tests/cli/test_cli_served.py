"""`run`, `chat` and notebooks with a model that a running server has."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from live_server import LiveServer, SeveralServer
from PIL import Image

from mlxinfer import InvalidRequestError, hub
from mlxinfer.cli import _open
from mlxinfer.cli._open import served_name
from mlxinfer.magics import Magics
from mlxinfer.server.keys import ApiKeys

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
SAID = "answers from the server at"

SWITCH = "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo, with a chat template that has a switch for thinking."""
    folder = tmp_path_factory.mktemp("thinks") / "demo"
    shutil.copytree(hub.resolve("demo"), folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] += SWITCH
    file.write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def server(thinker: str) -> Iterator[LiveServer]:
    """Models by the folders or bundled names that they have in this process."""
    sources = {"demo": "demo", "sees": "demo-vision", "thinks": thinker}
    folders = {name: hub.resolve(source) for name, source in sources.items()}
    with SeveralServer(folders) as running:
        for slot in running.service.models.slots():
            slot.entry = replace(slot.entry, source=sources[slot.entry.name])
        yield running


@pytest.fixture
def drawing(tmp_path: Path) -> str:
    """The path of a picture with a red square."""
    image = Image.new("RGB", (120, 120), "white")
    image.paste("red", (35, 35, 85, 85))
    image.save(tmp_path / "drawing.png")
    return str(tmp_path / "drawing.png")


@pytest.fixture(autouse=True)
def named(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_SERVER", server.url)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are loaded in this process; none is."""
    seen: list[str] = []

    def refuse(name: str, *_: object) -> None:
        seen.append(name)
        raise InvalidRequestError(f"loads {name}")

    monkeypatch.setattr("mlxinfer.llm.load_session", refuse)
    return seen


@pytest.mark.alike
@pytest.mark.parametrize(
    "words",
    [
        ["What is a KV cache?", "--temperature", "0", "--max-tokens", "12"],
        ["Tell me", "--schema", SCHEMA, "--temperature", "0"],
        ["Once", "--raw", "--max-tokens", "8"],
        ["hi", "--seed", "5", "--max-tokens", "8"],
        ["hi", "--system", "Be brief.", "--stop", "model"],
        ["What is in this picture?", "--image", "DRAWING", "-m", "demo-vision"],
        ["hi", "--think", "-m", "THINKER", "--max-tokens", "12", "--temperature", "0"],
        ["hi", "--no-think", "-m", "THINKER", "--max-tokens", "12", "--temperature", "0"],
    ],
)
def test_an_answer_is_that_of_the_model_here(
    words: list[str], outcome: Any, drawing: str, thinker: str
) -> None:
    files = {"DRAWING": drawing, "THINKER": thinker}
    asked = ["run", *(files.get(word, word) for word in words), "--json"]
    there, here = outcome(*asked), outcome(*asked, "--local")
    assert SAID in there.err
    assert SAID not in here.err
    both = [json.loads(seen.out) for seen in (there, here)]
    for answer in both:
        del answer["timing"], answer["cached_tokens"]
    assert both[0] == both[1]
    assert bool(both[0].get("reasoning")) is ("--think" in words)


def test_served_models_are_not_loaded(server: LiveServer, outcome: Any, loads: list[str]) -> None:
    assert outcome("run", "hi", "--max-tokens", "2").code == 0
    assert loads == []
    for words in (["--local"], ["--kv-bits", "8"], ["--adapter", "folder"], ["-m", "demo-draft"]):
        assert "loads demo" in outcome("run", "hi", *words).err
    assert loads == ["demo", "demo", "demo", "demo-draft"]


def test_a_server_is_named_by_address(server: LiveServer, outcome: Any, loads: list[str]) -> None:
    seen = outcome("run", "hi", "-m", f"{server.url}/v1", "--max-tokens", "3")
    assert (seen.code, seen.out) == (0, "Hello! I\n")
    refused = outcome("run", "hi", "-m", server.url, "--kv-bits", "8")
    assert "chose its engine's options" in refused.err
    assert (
        "--adapter is for a model here"
        in outcome("run", "hi", "-m", server.url, "--adapter", "folder").err
    )


def test_a_chat_asks_the_server(
    server: LiveServer, outcome: Any, monkeypatch: pytest.MonkeyPatch, loads: list[str]
) -> None:
    lines = iter(["/set temperature 0", "/set max_tokens 3", "hi", "/stats", "/think on"])

    def read(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("mlxinfer.cli.chat.open_reader", lambda _: read)
    seen = outcome("chat")
    assert "Hello! I\n" in seen.out
    assert f"at {server.url}" in seen.out
    assert "of weights at the server" in seen.out
    assert "has no switch for thinking" in seen.err
    assert loads == []


def test_a_magic_asks_the_server(
    server: LiveServer, capsys: pytest.CaptureFixture[str], loads: list[str]
) -> None:
    variables: dict[str, Any] = {}
    magics = Magics(variables)
    magics.ask("temperature=0 max_tokens=3", "hi")
    assert "Hello! I" in capsys.readouterr().out
    with pytest.raises(InvalidRequestError, match="loads demo"):
        magics.ask("-m demo --local", "hi")


def test_the_default_address_is_asked_where_none_is_named(
    server: LiveServer,
    outcome: Any,
    monkeypatch: pytest.MonkeyPatch,
    loads: list[str],
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("MLXINFER_SERVER")
    monkeypatch.setenv("MLXINFER_SERVE_PORT", str(server.port))
    assert SAID in outcome("run", "hi", "--max-tokens", "2").err
    monkeypatch.setenv("MLXINFER_SERVER", "off")
    assert "loads demo" in outcome("run", "hi").err
    for address, said in (("http://127.0.0.1:9", "answers at http://127.0.0.1:9"), ("x", "is 'x'")):
        monkeypatch.setenv("MLXINFER_SERVER", address)
        seen = outcome("run", "hi")
        assert (seen.code, said in seen.err) == (1, True)


def test_a_server_with_keys_is_asked_with_the_key_of_the_environment(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, loads: list[str]
) -> None:
    with LiveServer(keys=ApiKeys.from_plain(["sk-test"])) as keyed:
        monkeypatch.delenv("MLXINFER_SERVER")
        monkeypatch.setenv("MLXINFER_SERVE_PORT", str(keyed.port))
        seen = outcome("run", "hi", "-m", "demo")
        assert "may have demo, which is loaded here" in seen.err
        assert "Set MLXINFER_API_KEY" in seen.err
        monkeypatch.setenv("MLXINFER_API_KEY", "sk-test")
        assert outcome("run", "hi", "--max-tokens", "2", "-m", "demo").code == 0


def test_a_model_is_found_by_its_repository_and_its_folder(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    slot, *_ = server.service.models.slots()
    entry = slot.entry
    for source, names in (("org/name", ["org/name", "demo"]), (str(folder), [str(folder)])):
        monkeypatch.setattr(slot, "entry", replace(entry, source=source))
        assert [served_name(server.url, name) for name in names] == ["demo"] * len(names)
        assert str(folder) not in server.get("/v1/models").text
    assert served_name(server.url, "weights") is None
    assert served_name(server.url, str(tmp_path)) is None


def test_a_lost_server_is_one_sentence(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer() as running:
        monkeypatch.setattr(_open, "_served", lambda _: (running.url, "demo"))
        emitted = running.model.session.engine._loop._emit

        def cut(events: list[Any]) -> None:
            emitted(events)
            for connection in list(running.server.server_state.connections):
                loop = running.server._loop
                loop.call_soon_threadsafe(connection.transport.abort)

        running.model.session.engine._loop._emit = cut
        seen = outcome("run", "What is a KV cache?", "--max-tokens", "400")
        running.model.session.engine._loop._emit = emitted
    assert seen.code == 1
    assert seen.err.splitlines()[-1].startswith("error: The server at http://127.0.0.1:")
    assert "ended the connection before its answer was complete" in seen.err
    assert "Traceback" not in seen.err
