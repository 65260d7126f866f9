"""Tools of MCP servers: a real server over pipes, and chats that call it."""

import asyncio
import contextlib
import io
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from cli.fake_llm import FakeLLM
from rich.console import Console

from benchmarks.processes import free_port
from mlxinfer.cli import _configuration, chat
from mlxinfer.cli._chat_session import COMMANDS, ChatSession
from mlxinfer.cli._configuration import open_tools
from mlxinfer.config.file import ConfigFile, ToolServer, read_config_file
from mlxinfer.errors import InvalidRequestError
from mlxinfer.mcp_tools import McpTools
from mlxinfer.outputs import Result, ToolCall
from mlxinfer.text.tools.schema import Toolbox
from tests.waiting import wait_until

COMMAND = (sys.executable, str(Path(__file__).parent / "mcp_server.py"))
SERVER = ToolServer(command=COMMAND, env={"NUMBERS": "some"}, allow=("add",))


@pytest.fixture(scope="module")
def tools() -> Iterator[McpTools]:
    server = replace(SERVER, env={"NUMBERS": "some\x1b[7m"})
    opened = McpTools({"one": server, "broken": ToolServer(command=("no-such-program",))})
    yield opened
    opened.close()


def test_tools_are_listed_and_called(tools: McpTools) -> None:
    [add] = [t["function"] for t in tools.schemas if t["function"]["name"] == "add"]
    assert add["description"] == "Add two numbers."
    assert set(add["parameters"]["properties"]) == {"a", "b"}
    assert tools.call("add", '{"a": 2, "b": 3}') == "2 + 3 = 5"
    assert tools.call("home", "").startswith("some\x1b[7m\n0")
    assert (tools.allows("add"), tools.allows("fail"), tools.allows("other")) == (1, 0, 0)
    assert list(tools.failures) == ["broken"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("fail", "{}"), ("add", '{"a": "x"}'), ("add", "{"), ("add", "[" * 100_000), ("none", "{}")],
)
def test_errors_are_texts_for_the_model(tools: McpTools, name: str, arguments: str) -> None:
    assert tools.call(name, arguments).startswith("Error")


@pytest.mark.ci
def test_names_that_two_servers_have_begin_with_the_servers() -> None:
    tools = McpTools({"one": SERVER, "two": replace(SERVER, allow=())})
    names = [tool["function"]["name"] for tool in tools.schemas]
    assert "one__add" in names
    assert tools.call("two__add", '{"a": 1, "b": 1}') == "1 + 1 = 2"
    assert (tools.allows("one__add"), tools.allows("two__add")) == (True, False)
    tools.close()


def tool(name: Any, schema: Any = None) -> Any:
    return SimpleNamespace(name=name, description="d", input_schema=schema or {"type": "object"})


def connected(actual: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> McpTools:
    """The tools of servers that offer these."""

    async def connect(_: McpTools, __: object, name: str, ___: object) -> list[Any]:
        return actual[name]

    monkeypatch.setattr(McpTools, "_connect", connect)
    return McpTools(dict.fromkeys(actual, SERVER))


@pytest.mark.parametrize("seed", range(20))
def test_no_tool_has_the_name_of_another(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that offer each other's names, joined or not, twice, and names that are none."""
    bad = ("", "a b", "a\x1b[2Jb", "run?\nyes", "x" * 5000, "r\u0435ad", "\u202ed")
    rng = random.Random(seed)
    servers = ["files", "evil", "files__read", "x"]
    parts = ["read", "read__text", "text", "files__read", "evil__read", "files__read__text", *bad]
    rng.shuffle(servers)
    by_name = {server: [tool(rng.choice(parts)) for _ in range(6)] for server in servers}
    by_name["x"].append(tool("odd", {"type": "string"}))
    tools = connected(by_name, monkeypatch)
    tools.close()
    names = [schema["function"]["name"] for schema in tools.schemas]
    assert len(Toolbox.of(tools.schemas)) == len(names) == len(set(names))
    for name in names:
        server, own = tools._tools[name]
        assert own in [item.name for item in by_name[server]]
        assert name in (own, f"{server}__{own}")
        assert name.isascii()
        assert name.isprintable()
        plain = [other for other, given in by_name.items() for item in given if item.name == name]
        assert name != own or plain == [server], "another server has this tool, too"
    offered = set(tools._tools.values())
    for server, given in by_name.items():
        for item in given:
            assert (server, item.name) in offered or f"{server}, {item.name!r}"[:70] in [
                told[:70] for told in tools.left_out
            ]
    assert any(told.startswith("x, 'odd'") for told in tools.left_out)
    assert all(told.isprintable() for told in tools.left_out)


def test_a_tool_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(_configuration, "note", notes.append)
    result = {"evil": [tool("good"), tool("a\x1b[2J")]}
    monkeypatch.setattr(_configuration, "McpTools", lambda _: connected(result, monkeypatch))
    tools = open_tools(ConfigFile(mcp={"evil": SERVER}))
    assert tools is not None
    assert "evil, 'a\\x1b[2J'" in notes[0]
    session = ChatSession("fake", lambda _: FakeLLM(), tools=tools)
    reply = COMMANDS["tools"][1](session, "").text
    assert "good" in reply
    assert "evil, 'a\\x1b[2J'" in reply
    assert "\x1b" not in reply
    tools.close()


def test_a_fault_while_tools_are_listed_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    result = {"one": [SimpleNamespace(name="add", description="d")]}  # it has no schema
    with pytest.raises(AttributeError, match="input_schema"):
        connected(result, monkeypatch)
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_a_connection_that_is_cancelled_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object) -> list[Any]:
        raise asyncio.CancelledError

    monkeypatch.setattr(McpTools, "_connect", connect)
    tools = McpTools({"one": SERVER})
    tools.close()
    assert (tools.schemas, tools.failures) == ([], {"one": "CancelledError"})


def test_without_servers_there_are_no_tools_and_nothing_to_end() -> None:
    tools = McpTools({})
    tools.close()
    assert (tools.schemas, tools.failures) == ([], {})


@pytest.mark.ci
def test_a_server_that_ends_leaves_the_others() -> None:
    port = free_port()
    address = ToolServer(url=f"http://127.0.0.1:{port}/mcp")
    tools = McpTools({"remote": address})
    assert "connection" in tools.failures["remote"].lower()  # the cause, not "a group of tasks"
    tools.close()
    running = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        tools = McpTools({"remote": address, "local": SERVER})
        assert tools.failures == {}
        assert tools.call("remote__end", "{}").startswith("Error")
        assert tools.call("local__add", '{"a": 1, "b": 1}') == "1 + 1 = 2"
        assert tools.call("remote__home", "{}").startswith("Error: the MCP server remote has ended")
        running.wait()
        running = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
        wait_for_port(port)
        assert tools.call("remote__add", '{"a": 1, "b": 1}') == "1 + 1 = 2"
        tools.close()
    finally:
        running.kill()
        running.wait()


@pytest.mark.ci
def test_a_server_that_died_is_started_again_by_the_next_call() -> None:
    tools = McpTools({"one": SERVER})
    assert tools.call("end", "{}").startswith("Error")
    assert tools.call("add", '{"a": 1, "b": 1}') == "1 + 1 = 2"
    assert tools.failures == {}
    tools.close()


def wait_for_port(port: int) -> None:
    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_until(listens, pause_s=0.1)


class Caller(FakeLLM):
    """Calls a tool, then answers with its result."""

    call: tuple[str, dict[str, Any]]

    def _result(self, count: int) -> Result:
        result = super()._result(count)
        messages: Any = self.asked[-1][0]
        if messages[-1]["role"] == "tool":
            return result
        name, arguments = self.call
        call = ToolCall(id="c1", name=name, arguments=json.dumps(arguments))
        return replace(result, tool_calls=(call,))


@pytest.mark.parametrize(
    ("call", "said", "result", "shown"),
    [
        (("add", {"a": 2, "b": 2}), None, "2 + 2 = 4", "2 + 2 = 4"),
        (("home", {}), "yes", "some\x1b[7m\n0\n1\n2\n3\n4\n5", "… 2 more lines"),
        (("home", {}), "no", "Error: the user did not allow this call.", "home({})"),
    ],
)
def test_a_chat_calls_tools_and_answers_with_their_results(
    tools: McpTools,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: tuple[str, dict[str, Any]],
    said: str | None,
    result: str,
    shown: str,
) -> None:
    asked = []
    monkeypatch.setattr(chat, "allowed", lambda name: asked.append(name) or said)
    llm = Caller(tmp_path / "model")
    llm.call = call
    session = ChatSession("fake", lambda _: llm, tools=tools)
    screen = io.StringIO()
    chat.take_turn(session, "How much is it?", Console(file=screen, width=80))
    assert [message["role"] for message in session.messages] == [
        *("user", "assistant", "tool", "assistant")
    ]
    _, called, told, _ = session.messages
    assert called["tool_calls"][0]["function"]["name"] == call[0]
    assert (told["tool_call_id"], told["content"]) == ("c1", result)
    assert llm.options[0]["tools"] == tools.schemas
    assert shown in screen.getvalue()
    assert "\x1b" not in screen.getvalue()  # no tool steers the terminal
    assert asked == ([] if said is None else [call[0]])


def test_a_stopped_call_has_a_result_and_an_empty_answer(
    tools: McpTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates refuse calls without results, and two questions in turn."""

    def stopped(name: str) -> str:
        raise click.Abort  # Ctrl-C at the question

    monkeypatch.setattr(chat, "allowed", stopped)
    llm = Caller(tmp_path / "model")
    llm.call = ("home", {"text": "long " * 40 + "end"})
    session = ChatSession("fake", lambda _: llm, tools=tools)
    screen = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        chat.take_turn(session, "Do it", Console(file=screen, width=80))
    said = [(message["role"], message["content"]) for message in session.messages]
    assert said[2:] == [("tool", chat.STOPPED), ("assistant", "")]
    assert "end" in screen.getvalue()  # whoever is asked sees all of the arguments


def test_rounds_are_bounded(
    tools: McpTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_ROUNDS", 0)
    llm = Caller(tmp_path / "model")
    llm.call = ("add", {"a": 2, "b": 2})
    session = ChatSession("fake", lambda _: llm, tools=tools)
    chat.take_turn(session, "How much?", Console(file=io.StringIO()))
    said = [(message["role"], message["content"]) for message in session.messages]
    assert said[2:] == [("tool", chat.LIMIT), ("assistant", "")]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("command = []", "either a command"),
        ('command = ["x"]\nurl = "http://127.0.0.1"', "either a command"),
        ('command = "x"', "a list of texts"),
        ("url = 3", "url: expected a text"),
        ('url = "http://127.0.0.1"\ntimeout = 3', "known are command, url, env, allow"),
    ],
)
def test_wrong_servers_are_named(tmp_path: Path, table: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[mcp.files]\n{table}\n")
    with pytest.raises(InvalidRequestError, match=f"mcp.files.*{message}"):
        read_config_file(file)
